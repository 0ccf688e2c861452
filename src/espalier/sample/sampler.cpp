// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/sampler.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "espalier/engine/step.h"

namespace espalier {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Completion, row, sample, tokens, logprobs, stopped, kept_tokens,
                                   prompt_logprobs)

int64_t prompt_size(const Trajectories& trajectories, int64_t row) {
  const int64_t begin = trajectories.offsets[row], size = trajectories.row_size(row);
  for (int64_t t = 0; t < size; ++t) {
    if (trajectories.loss_weights[begin + t] > 0) return t == 0 ? size : t;
  }
  return size;
}

Trajectories prompts_of(const Trajectories& trajectories, bool whole_rows) {
  TrajectoriesBuilder builder;
  TrajectoryRow prompt;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    int64_t size = prompt_size(trajectories, row);
    if (whole_rows && size < trajectories.row_size(row)) {
      ESPALIER_CHECK(
          trajectories.logprobs.has(row),
          "trajectory {}: field `logprobs`: expected log-probabilities of its tokens with loss, which "
          "the rows that continue it keep, received none",
          trajectories.name(row));
      size = trajectories.row_size(row);
    }
    const auto tokens = trajectories.row(row).first(size);
    prompt.input_ids.assign(tokens.begin(), tokens.end());
    builder.append(prompt);
  }
  return builder.finish();
}

namespace {

const SampleOptions& options_of_row(const SampleOptions& options, int64_t row) {
  return options.rows.empty() ? options : options.rows[row];
}

/// sample() of a part of the rows, in this order.
SampleResult sample_rows(Sampling& sampling, const Trajectories& prompts, std::span<const int64_t> rows,
                         const SampleOptions& options, const SampleEvents& events) {
  int64_t finished = 0, completions = 0;
  for (const int64_t row : rows) {
    const bool has_own = !options.rows.empty();
    const SampleOptions& own = options_of_row(options, row);
    sampling.add(row, prompts.row(row), own, has_own ? 0 : row);
    completions += own.samples;
  }
  SampleResult result;
  while (!sampling.is_idle()) {
    for (Completion& completion : sampling.step(events.watch)) {
      if (completion.error) std::rethrow_exception(completion.error);
      ++finished;
      result.completions.push_back(std::move(completion));
    }
    if (events.progress) events.progress(finished, completions);
  }
  static_cast<SamplingCounts&>(result) = sampling.counts();
  return result;
}

/// Adds how tokens are chosen. What a row has already, of tokens that it keeps, stays where nothing changes.
void add_choice(const TokenChoiceOptions& choice, TrajectoryRow* row) {
  if (choice.temperature != 1) row->temperature = choice.temperature;
  if (choice.top_k > 0) row->top_k = static_cast<double>(choice.top_k);
  if (choice.top_p < 1) row->top_p = choice.top_p;
}

/// The first `size` tokens of a row. Loss, log-probabilities and how its tokens were chosen are kept if the
/// prompt has tokens with loss.
TrajectoryRow prompt_row(const Trajectories& rows, int64_t r, int64_t size) {
  TrajectoryRow row;
  if (prompt_size(rows, r) < size) {
    TrajectoryRow whole = copy_row(rows, r);
    row.input_ids = std::move(whole.input_ids);
    row.loss_mask = std::move(whole.loss_mask);
    row.loss_weights = std::move(whole.loss_weights);
    row.logprobs = std::move(whole.logprobs);
    row.temperature = whole.temperature;
    row.top_k = whole.top_k;
    row.top_p = whole.top_p;
  } else {
    const auto tokens = rows.row(r).first(size);
    row.input_ids.assign(tokens.begin(), tokens.end());
    row.loss_mask.assign(size, 0);
    row.logprobs.assign(size, 0);
  }
  return row;
}

/// What all ranks have sampled.
std::vector<Completion> gathered(std::vector<Completion> completions, const Group& group) {
  const auto write = [](const std::vector<Completion>& own) { return nlohmann::json(own).dump(); };
  const auto read = [](const std::string& text) {
    return nlohmann::json::parse(text).get<std::vector<Completion>>();
  };
  std::vector<Completion> result;
  for (std::vector<Completion>& part : group.gather(std::move(completions), write, read)) {
    std::ranges::move(part, std::back_inserter(result));
  }
  return result;
}

void check_same_call(const Trajectories& prompts, const SampleOptions& options, const Group& group) {
  group.check_equal("prompts and seed", [&] {
    std::vector<uint64_t> seeds{options.seed};
    for (const SampleOptions& row : options.rows) seeds.push_back(row.seed);
    return fmt::format("{}, seed {}", content_hashes(prompts).at("input_ids"), fmt::join(seeds, ", "));
  });
}

SampleResult result_of_all_ranks(SampleResult result, const Group& group) {
  result.completions = gathered(std::move(result.completions), group);
  std::ranges::sort(result.completions, {}, [](const Completion& completion) {
    return std::pair(completion.row, completion.sample);
  });
  for (int64_t* count : {&result.flat_prompt_tokens, &result.kept_prompt_tokens,
                         &result.encoded_prompt_tokens, &result.sampled_tokens}) {
    *count = static_cast<int64_t>(group.add_up(std::vector{static_cast<double>(*count)}).front());
  }
  return result;
}

}  // namespace

std::vector<int64_t> prompt_order(const Forest& forest, const Group& group) {
  const int64_t count = forest.num_trajectories();
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int64_t row) { return forest.end_node[row]; });
  const auto begin_of = [&](int64_t rank) { return order.begin() + count * rank / group.size(); };
  return {begin_of(group.rank()), begin_of(group.rank() + 1)};
}

SampleResult sample(const Decoder& decoder, const Trajectories& prompts, const SampleOptions& options,
                    const SampleEvents& events, const SamplingMemory& memory, const Group& group,
                    const SampledWeights& weights) {
  check_same_call(prompts, options, group);
  for (int64_t row = 0; row < prompts.num_rows(); ++row) {
    Sampling::check(decoder, row, prompts.row_size(row), options_of_row(options, row));
  }
  const auto part = [&] {
    const std::vector<int64_t> rows = prompt_order(forest_of(prompts, {}), group);
    Sampling sampling(decoder, options, memory);
    sampling.use(weights);
    return sample_rows(sampling, prompts, rows, options, events);
  };
  return result_of_all_ranks(group.together(part), group);
}

void check_temperatures(const Trajectories& rows, const Trajectories& prompts, const SampleOptions& options) {
  for (int64_t row = 0; row < rows.num_rows(); ++row) {
    if (prompt_size(rows, row) == prompts.row_size(row)) continue;
    const double expected = rows.logit_temperature(row);
    const double received = options_of_row(options, row).choice.temperature;
    ESPALIER_CHECK((received == 0 ? 1 : received) == expected,
                   "trajectory {}: temperature: expected {}, that of the tokens with loss that the row has "
                   "already (field `temperature`), received {}",
                   rows.name(row), expected, received);
  }
}

Trajectories rows_of(const std::vector<Completion>& completions, const Trajectories& rows,
                     const Trajectories& prompts, const SampleOptions& options) {
  TrajectoriesBuilder builder;
  for (const Completion& completion : completions) {
    const std::string name = rows.name(completion.row);
    const bool grouped = !rows.group_id.empty() && !rows.group_id[completion.row].empty();
    TrajectoryRow row = prompt_row(rows, completion.row, prompts.row_size(completion.row));
    add_choice(options_of_row(options, completion.row).choice, &row);
    row.input_ids.insert(row.input_ids.end(), completion.tokens.begin(), completion.tokens.end());
    if (row.loss_weights.empty()) {
      row.loss_mask.resize(row.input_ids.size(), 1);
    } else {
      row.loss_weights.resize(row.input_ids.size(), 1);
    }
    for (size_t i = 0; i < completion.prompt_logprobs.size(); ++i) {
      if (row.logprobs[i] == 0) row.logprobs[i] = completion.prompt_logprobs[i];
    }
    row.logprobs.insert(row.logprobs.end(), completion.logprobs.begin(), completion.logprobs.end());
    row.trajectory_id = fmt::format("{}/sample-{}", name, completion.sample);
    row.group_id = grouped ? rows.group_id[completion.row] : name;
    builder.append(row);
  }
  return builder.finish();
}

void SamplingFlags::add_sampling(OptionList* list) {
  list->group("Sampling");
  list->add("samples", &options.samples, "Completions per prompt, which form a group", {.least = 1});
  list->add("max-new-tokens", &options.max_new_tokens, "Maximum tokens of a completion", {.least = 1});
  list->add("temperature", &options.choice.temperature,
            "Divide logits by this. 0: always take the most likely token", {.least = 0});
  list->add("top-k", &options.choice.top_k, "Choose among the K most likely tokens (0: all)", {.least = 0});
  list->add("top-p", &options.choice.top_p,
            "Choose among the smallest set of most likely tokens (after --top-k) whose probabilities "
            "sum up to P",
            {.least = 0, .most = 1});
  list->add("stop-id", &options.stop_ids,
            "Token ids that end a completion, which keeps them. Without it: eos_token_id of "
            "generation_config.json, or else of config.json",
            {.least = 0});
  list->add("ignore-stop-ids", &ignore_stop_ids,
            "Do not stop at stop ids: always sample --max-new-tokens tokens");
  list->add("whole-rows", &whole_rows,
            "Continue whole rows instead of prompts, and keep their loss and log-probabilities: for "
            "conversations with sampled turns, after a tool's result");
  list->add("prompt-logprobs", &options.prompt_logprobs,
            "Also write log-probabilities of the prompts' tokens, at temperature 1");
  list->add("seed", &options.seed,
            "Random seed. Each completion has its own random stream, by the number of its prompt's row "
            "and its number among the completions");
}

void SamplingFlags::add_sizes(OptionList* list) {
  list->group(kMachineGroup);
  list->add("batch-size", &options.batch_size,
            "Maximum number of completions sampled together: more are faster per token and use more memory "
            "for keys and values",
            {.least = 1});
  list->add("token-budget", &options.token_budget,
            "Maximum number of prompt tokens, shared ones counted once, whose keys and values are kept at a "
            "time. A single prompt may have more",
            {.least = 1});
}

SampleOptions SamplingFlags::resolved(const std::function<std::vector<int32_t>()>& model_stop_ids,
                                      int64_t vocab_size) const {
  SampleOptions all = options;
  if (ignore_stop_ids) {
    all.stop_ids.clear();
  } else if (all.stop_ids.empty()) {
    std::ranges::copy_if(model_stop_ids(), std::back_inserter(all.stop_ids),
                         [&](int32_t id) { return id < vocab_size; });
  }
  return all;
}

}  // namespace espalier
