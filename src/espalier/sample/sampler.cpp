// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/sampler.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/interrupt.h"
#include "espalier/base/rng.h"
#include "espalier/data/builder.h"
#include "espalier/engine/step.h"
#include "espalier/model/gradient_accumulation.h"
#include "espalier/runtime/device.h"
#include "espalier/runtime/stopwatch.h"
#include "espalier/sample/decode_batch.h"
#include "espalier/sample/encoded_prompts.h"

namespace espalier {

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

/// Number of tokens shared by the root paths of two nodes.
int64_t shared_tokens(const Forest& forest, int64_t a, int64_t b) {
  const std::vector<int64_t> first = root_path(forest, a), second = root_path(forest, b);
  int64_t tokens = 0;
  for (size_t i = 0; i < std::min(first.size(), second.size()) && first[i] == second[i]; ++i) {
    tokens += forest.node_size(first[i]);
  }
  return tokens;
}

// Tokens per micro-batch of prompts: large enough for full speed, small enough for little activation memory.
constexpr int64_t kMicroBatchTokens = 4096;

void check_options(const Decoder& decoder, const SampleOptions& options) {
  const auto from_one = [](const char* name, int64_t value) {
    ESPALIER_CHECK(value >= 1, "{}: expected 1 or more, received {}", name, value);
  };
  from_one("samples", options.samples);
  from_one("max-new-tokens", options.max_new_tokens);
  from_one("batch-size", options.batch_size);
  from_one("token-budget", options.token_budget);
  for (const int32_t id : options.stop_ids) {
    ESPALIER_CHECK(0 <= id && id < decoder.vocab_size(),
                   "--stop-id: expected ids below the vocabulary size {}, received {}", decoder.vocab_size(),
                   id);
  }
  TokenChooser{options.choice};  // throws if an option is out of range
  for (const SampleOptions& row : options.rows) check_options(decoder, row);
}

void check_prompts(const Decoder& decoder, const Trajectories& prompts) {
  const int64_t most = decoder.config().max_position_embeddings;
  for (int64_t row = 0; row < prompts.num_rows(); ++row) {
    ESPALIER_CHECK(most == 0 || prompts.row_size(row) < most,
                   "trajectory {}: expected a prompt of fewer than {} tokens (max_position_embeddings), "
                   "received {}",
                   prompts.name(row), most, prompts.row_size(row));
  }
}

/// The random stream of one sample of one row.
Rng sample_stream(uint64_t seed, int64_t row, int64_t sample) {
  return Rng(seed, (static_cast<uint64_t>(row) << 32) | static_cast<uint64_t>(sample));
}

/// A completion that is being sampled.
struct Sequence {
  Completion completion;
  const SampleOptions* options;
  int64_t prompt;  // index in the encoded group
  int64_t most;    // maximum number of tokens
  Rng rng;

  bool done() const { return completion.stopped || static_cast<int64_t>(completion.tokens.size()) == most; }
};

class Sampler {
 public:
  Sampler(const Decoder& decoder, const Trajectories& prompts, const SampleOptions& options,
          const std::function<void(const SampleProgress&)>& progress, const TokenWatch& watch)
      : decoder_(decoder), prompts_(prompts), options_(options), progress_(progress), watch_(watch) {
    for (int64_t row = 0; row < prompts.num_rows(); ++row) {
      most_new_tokens_ = std::max(most_new_tokens_, options_of(row).max_new_tokens);
    }
  }

  SampleResult run(const Group& ranks) {
    const accumulating::PreparedWeights prepared;
    const auto groups = prompt_groups(forest_of(prompts_, {}), options_.token_budget, ranks);
    for (const std::vector<int64_t>& group : groups) {
      for (const int64_t row : group) status_.completions += options_of(row).samples;
    }
    for (const std::vector<int64_t>& group : groups) run_group(group);
    return std::move(result_);
  }

 private:
  void run_group(const std::vector<int64_t>& rows) {
    Stopwatch encoding(decoder_.device());
    encoding.start();
    const EncodedPrompts encoded(decoder_, prompts_, rows, std::min(kMicroBatchTokens, options_.token_budget),
                                 [&](int64_t, int64_t) { report_progress(); });
    encoding.stop();
    synchronize(decoder_.device());
    result_.prompt_seconds += encoding.seconds();
    result_.encoded_prompt_tokens += encoded.tree_tokens();

    Stopwatch decoding(decoder_.device());
    decoding.start();
    std::vector<Sequence> live, waiting = make_sequences(rows);  // the next one last
    const auto most = static_cast<size_t>(options_.batch_size);
    DecodeBatch batch(decoder_, encoded, static_cast<int64_t>(std::min(most, waiting.size())));
    while (!waiting.empty() || !live.empty()) {
      check_interrupt();
      std::vector<Sequence> new_sequences;
      while (!waiting.empty() && live.size() + new_sequences.size() < most) {
        new_sequences.push_back(std::move(waiting.back()));
        waiting.pop_back();
      }
      begin(encoded, std::move(new_sequences), &batch, &live);
      if (live.empty()) continue;
      std::vector<int32_t> tokens;
      for (const Sequence& sequence : live) tokens.push_back(sequence.completion.tokens.back());
      choose(logits_of(batch.step(tokens)), live);
      ++result_.decode_steps;
      finish_done(&batch, &live);
    }
    decoding.stop();
    result_.decode_seconds += decoding.seconds();
  }

  const SampleOptions& options_of(int64_t row) const {
    return options_.rows.empty() ? options_ : options_.rows[row];
  }

  std::vector<Sequence> make_sequences(const std::vector<int64_t>& rows) const {
    const int64_t limit = decoder_.config().max_position_embeddings;
    std::vector<Sequence> sequences;
    for (auto prompt = static_cast<int64_t>(rows.size()) - 1; prompt >= 0; --prompt) {
      const int64_t row = rows[prompt], place = options_.rows.empty() ? row : 0;
      const SampleOptions& own = options_of(row);
      int64_t most = own.max_new_tokens;
      if (limit > 0) most = std::min(most, limit - prompts_.row_size(row));
      for (int64_t sample = own.samples - 1; sample >= 0; --sample) {
        sequences.push_back(
            {{.row = row, .sample = sample}, &own, prompt, most, sample_stream(own.seed, place, sample)});
      }
    }
    return sequences;
  }

  /// Samples the first tokens, which the prompts predict. Sequences that do not end there become live.
  void begin(const EncodedPrompts& encoded, std::vector<Sequence> sequences, DecodeBatch* batch,
             std::vector<Sequence>* live) {
    if (sequences.empty()) return;
    std::vector<int64_t> prompt_index;
    for (const Sequence& sequence : sequences) {
      prompt_index.push_back(sequence.prompt);
      result_.flat_prompt_tokens += encoded.size(sequence.prompt);
    }
    const at::Tensor rows = at::tensor(prompt_index, at::kLong).to(decoder_.device());
    choose(logits_of(encoded.last_hidden().index_select(0, rows)), sequences);
    for (Sequence& sequence : sequences) {
      if (sequence.done()) {
        finish(std::move(sequence));
      } else {
        batch->add(sequence.prompt);
        live->push_back(std::move(sequence));
      }
    }
  }

  /// Logits [B, V] on the host, in the accumulator dtype.
  at::Tensor logits_of(const at::Tensor& hidden) const {
    const at::NoGradGuard no_grad;
    const at::Tensor logits =
        accumulating::head_logits(decoder_.final_norm(hidden), decoder_.lm_head_weight());
    return decoder_.capped(logits).cpu();
  }

  /// Chooses a token for each sequence from its row of logits, rows in parallel.
  void choose(const at::Tensor& logits, std::vector<Sequence>& sequences) {
    const auto choose_as = [&]<class Scalar>(Scalar) {
      const at::Tensor rows = logits.contiguous();
      const auto width = static_cast<size_t>(rows.size(1));
      at::parallel_for(0, rows.size(0), 1, [&](int64_t begin, int64_t end) {
        TokenChooser chooser(sequences[begin].options->choice);
        for (int64_t i = begin; i < end; ++i) {
          Sequence& sequence = sequences[i];
          const SampleOptions& own = *sequence.options;
          if (i > begin && own.choice != sequences[i - 1].options->choice) chooser = TokenChooser(own.choice);
          const TokenChoice chosen =
              chooser.choose(std::span<const Scalar>(rows.const_data_ptr<Scalar>() + i * width, width),
                             sequence.rng.uniform());
          sequence.completion.tokens.push_back(chosen.token);
          sequence.completion.logprobs.push_back(chosen.logprob);
          sequence.completion.stopped = std::ranges::find(own.stop_ids, chosen.token) != own.stop_ids.end();
        }
      });
    };
    if (logits.scalar_type() == at::kDouble) {
      choose_as(double());
    } else {
      choose_as(float());
    }
    result_.sampled_tokens += static_cast<int64_t>(sequences.size());
    report_progress();
    if (!watch_) return;
    std::vector<const Completion*> completions;
    for (const Sequence& sequence : sequences) completions.push_back(&sequence.completion);
    const std::vector<bool> ends = watch_(completions);
    for (size_t i = 0; i < ends.size(); ++i) sequences[i].completion.stopped |= ends[i];
  }

  void finish_done(DecodeBatch* batch, std::vector<Sequence>* live) {
    std::vector<bool> keep;
    for (const Sequence& sequence : *live) keep.push_back(!sequence.done());
    if (std::ranges::find(keep, false) == keep.end()) return;
    batch->keep(keep);
    std::vector<Sequence> rest;
    for (Sequence& sequence : *live) {
      if (sequence.done()) {
        finish(std::move(sequence));
      } else {
        rest.push_back(std::move(sequence));
      }
    }
    *live = std::move(rest);
  }

  void finish(Sequence sequence) {
    ++status_.finished;
    finished_tokens_ += static_cast<int64_t>(sequence.completion.tokens.size());
    result_.completions.push_back(std::move(sequence.completion));
  }

  void report_progress() {
    if (!progress_) return;
    status_.sampled_tokens = result_.sampled_tokens;
    const int64_t open = result_.sampled_tokens - finished_tokens_;
    const auto most = static_cast<double>(most_new_tokens_);
    status_.fraction = (static_cast<double>(status_.finished) + static_cast<double>(open) / most) /
                       static_cast<double>(status_.completions);
    progress_(status_);
  }

  const Decoder& decoder_;
  const Trajectories& prompts_;
  const SampleOptions& options_;
  const std::function<void(const SampleProgress&)>& progress_;
  const TokenWatch& watch_;
  int64_t most_new_tokens_ = 1;
  SampleResult result_;
  SampleProgress status_;
  int64_t finished_tokens_ = 0;
};

/// The first `size` tokens of a row. Loss and log-probabilities are kept if the prompt has tokens with loss.
TrajectoryRow prompt_row(const Trajectories& rows, int64_t r, int64_t size) {
  TrajectoryRow row;
  if (prompt_size(rows, r) < size) {
    TrajectoryRow whole = copy_row(rows, r);
    row.input_ids = std::move(whole.input_ids);
    row.loss_mask = std::move(whole.loss_mask);
    row.loss_weights = std::move(whole.loss_weights);
    row.logprobs = std::move(whole.logprobs);
  } else {
    const auto tokens = rows.row(r).first(size);
    row.input_ids.assign(tokens.begin(), tokens.end());
    row.loss_mask.assign(size, 0);
    row.logprobs.assign(size, 0);
  }
  return row;
}

/// What all ranks have sampled.
std::vector<Completion> gathered(const std::vector<Completion>& completions, const Group& group) {
  nlohmann::json own = nlohmann::json::array();
  for (const Completion& each : completions) {
    own.push_back({each.row, each.sample, each.tokens, each.logprobs, each.stopped});
  }
  std::vector<Completion> result;
  for (const std::string& text : group.gather(own.dump())) {
    for (const nlohmann::json& each : nlohmann::json::parse(text)) {
      result.push_back({each[0], each[1], each[2], each[3], each[4]});
    }
  }
  return result;
}

void check_same_call(const Trajectories& prompts, const SampleOptions& options, const Group& group) {
  std::vector<uint64_t> seeds{options.seed};
  for (const SampleOptions& row : options.rows) seeds.push_back(row.seed);
  group.check_equal("prompts and seed", fmt::format("{}, seed {}", content_hashes(prompts).at("input_ids"),
                                                    fmt::join(seeds, ", ")));
}

SampleResult of_all_ranks(SampleResult result, const Group& group) {
  if (group.size() > 1) result.completions = gathered(result.completions, group);
  std::ranges::sort(result.completions, {}, [](const Completion& completion) {
    return std::pair(completion.row, completion.sample);
  });
  for (int64_t* count : {&result.flat_prompt_tokens, &result.encoded_prompt_tokens, &result.sampled_tokens}) {
    *count = static_cast<int64_t>(group.add_up(std::vector{static_cast<double>(*count)}).front());
  }
  return result;
}

}  // namespace

std::vector<std::vector<int64_t>> prompt_groups(const Forest& forest, int64_t token_budget,
                                                const Group& group) {
  const int64_t count = forest.num_trajectories();
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return forest.end_node[a] < forest.end_node[b]; });
  std::vector<std::vector<int64_t>> groups;
  int64_t tokens = 0;
  const auto begin_of = [&](int64_t rank) { return count * rank / group.size(); };
  for (int64_t place = begin_of(group.rank()); place < begin_of(group.rank() + 1); ++place) {
    const int64_t r = order[place], size = forest.trajectory_size(r);
    // In preorder a path shares its longest prefix with the path just before it.
    const int64_t added = groups.empty() ? size
                                         : size - shared_tokens(forest, forest.end_node[groups.back().back()],
                                                                forest.end_node[r]);
    if (groups.empty() || tokens + added > token_budget) {
      groups.emplace_back();
      tokens = size;
    } else {
      tokens += added;
    }
    groups.back().push_back(r);
  }
  return groups;
}

SampleResult sample(const Decoder& decoder, const Trajectories& prompts, const SampleOptions& options,
                    const std::function<void(const SampleProgress&)>& progress, const TokenWatch& watch,
                    const Group& group) {
  if (group.size() > 1) check_same_call(prompts, options, group);
  check_options(decoder, options);
  check_prompts(decoder, prompts);
  return of_all_ranks(
      group.together([&] { return Sampler(decoder, prompts, options, progress, watch).run(group); }), group);
}

Trajectories rows_of(const std::vector<Completion>& completions, const Trajectories& rows,
                     const Trajectories& prompts) {
  TrajectoriesBuilder builder;
  for (const Completion& completion : completions) {
    const std::string name = rows.name(completion.row);
    const bool grouped = !rows.group_id.empty() && !rows.group_id[completion.row].empty();
    TrajectoryRow row = prompt_row(rows, completion.row, prompts.row_size(completion.row));
    row.input_ids.insert(row.input_ids.end(), completion.tokens.begin(), completion.tokens.end());
    if (row.loss_weights.empty()) {
      row.loss_mask.resize(row.input_ids.size(), 1);
    } else {
      row.loss_weights.resize(row.input_ids.size(), 1);
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

SampleOptions SamplingFlags::resolved(const std::function<std::vector<int32_t>()>& of_model,
                                      int64_t vocab_size) const {
  SampleOptions all = options;
  if (ignore_stop_ids) {
    all.stop_ids.clear();
  } else if (all.stop_ids.empty()) {
    std::ranges::copy_if(of_model(), std::back_inserter(all.stop_ids),
                         [&](int32_t id) { return id < vocab_size; });
  }
  return all;
}

}  // namespace espalier
