// SPDX-License-Identifier: Apache-2.0
// espalier sample: completions of prompts, as rows with behaviour log-probabilities.
#include <algorithm>
#include <memory>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/output.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/data_flags.h"
#include "espalier/config/stop_ids.h"
#include "espalier/data/builder.h"
#include "espalier/data/writer.h"
#include "espalier/distributed/group.h"
#include "espalier/measure/device_options.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/runtime/progress.h"
#include "espalier/sample/distributions.h"
#include "espalier/sample/sampler.h"

namespace espalier::cli {
namespace {

struct SampleArguments {
  DataFlags data;
  DeviceOptions device;
  const Group* group = &alone();
  SamplingFlags sampling;
  bool text = false, json = false;
  int64_t check = 16;
  std::string model, out;
  at::ScalarType dtype = at::kFloat;
};

SampleResult run_sampler(const SampleArguments& flags, const Decoder& decoder, const Trajectories& prompts) {
  const SamplingFlags& sampling = flags.sampling;
  const SampleOptions options =
      sampling.resolved([&] { return read_stop_ids(flags.model); }, decoder.vocab_size());
  if (!sampling.ignore_stop_ids && options.stop_ids.empty()) {
    log_line("{}: has no end-of-text token: every completion has --max-new-tokens tokens",
             printable(flags.model));
  }
  Progress progress("sampling");
  return sample(decoder, prompts, options,
                {.progress =
                     [&](const SampleProgress& status) {
                       progress.update(status.fraction,
                                       fmt::format("{} of {}, {}", with_commas(status.finished),
                                                   count_of(status.completions, "completion", "completions"),
                                                   count_of(status.sampled_tokens, "token", "tokens")));
                     }},
                {}, *flags.group);
}

/// The first `count` rows, with loss on the sampled tokens only.
Trajectories first_rows(const Trajectories& rows, const std::vector<Completion>& completions, int64_t count) {
  TrajectoriesBuilder builder;
  for (int64_t r = 0; r < std::min(count, rows.num_rows()); ++r) {
    TrajectoryRow row = copy_row(rows, r);
    row.loss_weights.clear();
    row.loss_mask.assign(row.input_ids.size() - completions[r].tokens.size(), 0);
    row.loss_mask.resize(row.input_ids.size(), 1);
    builder.append(row);
  }
  return builder.finish();
}

std::optional<Mismatch> check_rows(const SampleArguments& flags, const Decoder& decoder,
                                   const Trajectories& rows, const std::vector<Completion>& completions) {
  if (flags.check == 0) return std::nullopt;
  Progress progress("checking");
  return mismatch_of(decoder, first_rows(rows, completions, flags.check),
                     flags.sampling.options.choice.temperature, [&](int64_t done, int64_t total) {
                       progress.update(static_cast<double>(done) / static_cast<double>(total));
                     });
}

nlohmann::ordered_json report_of(const SampleResult& result, int64_t prompts,
                                 const std::optional<Mismatch>& mismatch) {
  nlohmann::ordered_json json = {
      {"prompts", prompts},
      {"completions", result.completions.size()},
      {"stopped", std::ranges::count(result.completions, true, &Completion::stopped)},
      {"flat_prompt_tokens", result.flat_prompt_tokens},
      {"encoded_prompt_tokens", result.encoded_prompt_tokens},
      {"sampled_tokens", result.sampled_tokens},
      {"decode_steps", result.decode_steps},
      {"prompt_seconds", result.prompt_seconds},
      {"decode_seconds", result.decode_seconds}};
  if (mismatch) {
    json["mismatch"] = {{"rows", mismatch->rows},
                        {"tokens", mismatch->tokens},
                        {"largest", mismatch->largest},
                        {"mean", mismatch->mean}};
  }
  return json;
}

/// Names, tokens and texts of completions.
nlohmann::json texts_of(const Vocabulary& vocabulary, const SampleResult& result, const Trajectories& rows) {
  auto texts = nlohmann::json::array();
  for (size_t i = 0; i < result.completions.size(); ++i) {
    const std::vector<int32_t>& tokens = result.completions[i].tokens;
    texts.push_back({printable(rows.name(static_cast<int64_t>(i))), tokens.size(),
                     printable_lines(vocabulary.text(tokens))});
  }
  return texts;
}

void run_sample(const SampleArguments& flags) {
  const auto [device, kernels] = flags.device.open(*flags.group);
  const KernelScope scope(kernels);
  const std::filesystem::path tokenizer = std::filesystem::path(flags.model) / "tokenizer.json";
  std::optional<Vocabulary> vocabulary;
  if (flags.text) vocabulary = read_vocabulary("sample", tokenizer);
  if (flags.group->is_first()) AtomicFile{flags.out};  // to fail now rather than after hours
  const Trajectories given = flags.data.read(data_use_of(flags.model));
  const Trajectories prompts = prompts_of(given, flags.sampling.whole_rows);
  note_carried_tensors(flags.model);
  const Decoder decoder = load_decoder(flags.model, flags.dtype, device);
  const double temperature = flags.sampling.options.choice.temperature;
  if (temperature != 0 && temperature != 1) {
    log_line("logprobs are computed at temperature {}, but `espalier train` computes them at temperature 1",
             temperature);
  }
  const SampleResult result = run_sampler(flags, decoder, prompts);
  if (!flags.group->is_first()) return;
  const Trajectories rows = rows_of(result.completions, given, prompts);
  write_trajectories(flags.out, rows);
  nlohmann::ordered_json json =
      report_of(result, prompts.num_rows(), check_rows(flags, decoder, rows, result.completions));
  if (flags.json) {
    print_output("{}\n", json.dump(2));
    return;
  }
  json = {{"report", std::move(json)}, {"out", printable(flags.out)}, {"texts", nlohmann::json::array()}};
  if (vocabulary) json["texts"] = texts_of(*vocabulary, result, rows);
  print_output("{}", by_python("sample", "sample", json.dump()));
}

}  // namespace

Command sample_command(const Group* group) {
  const auto flags = std::make_shared<SampleArguments>();
  if (group != nullptr) flags->group = group;
  Command command{
      .name = "sample",
      .summary = kSummaryOfSample,
      .closing =
          "The prompt of a row is its tokens before the first one with loss. If no token or the first token "
          "has loss, as in rows without a mask, it is the whole row. `espalier prepare` makes such rows from "
          "chats. With --whole-rows it is always the whole row.\n"
          "logprobs are those of the sampled tokens at --temperature over the whole vocabulary, regardless "
          "of --top-k and --top-p; at temperature 0 they are those at temperature 1. The same command "
          "samples the same rows.",
      .run = [flags](const OptionList&) {
        run_sample(*flags);
        return 0;
      }};
  OptionList& list = command.options;
  add_model(&list, &flags->model);
  flags->data.add(&list);
  flags->sampling.add_sampling(&list);
  list.group(kOutputGroup);
  list.add("out", &flags->out, "Rows to write: .jsonl (also .gz, .zst) or .safetensors",
           {.letter = 'o', .path = PathKind::kFile, .required = true});
  list.add("text", &flags->text, "Print the completions as text, using the model's tokenizer.json");
  list.add("json", &flags->json, "Print JSON", {.excludes = "text"});
  list.add("check", &flags->check,
           "Recompute the log-probabilities of the first N rows with the forward pass of training and "
           "print how much they differ (0: none)",
           {.least = 0});
  add_dtype(&list, "dtype", &flags->dtype, "Precision to compute in");
  flags->device.add(&list, /*trains=*/false);
  flags->sampling.add_sizes(&list);
  add_threads(&list);
  return command;
}

}  // namespace espalier::cli
