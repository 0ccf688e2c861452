// SPDX-License-Identifier: Apache-2.0
// espalier logprobs: log-probabilities, entropies and top-k tokens, computed on the shared trees.
#include <algorithm>
#include <memory>
#include <span>
#include <string>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/output.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/data_flags.h"
#include "espalier/data/writer.h"
#include "espalier/distributed/group.h"
#include "espalier/engine/cost.h"
#include "espalier/engine/engine.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/model_use.h"
#include "espalier/measure/planning.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/plan/planner.h"
#include "espalier/runtime/progress.h"
#include "espalier/sample/distributions.h"
#include "espalier/train/flags.h"

namespace espalier::cli {
namespace {

constexpr double kLeastTemperature = 1e-3;

struct LogprobsArguments {
  DataFlags data;
  Planning planning;
  DeviceOptions device;
  const Group* group = &alone();
  std::string model, adapter, out;
  at::ScalarType dtype = at::kFloat;
  DistributionOptions distribution;
  bool as_reference = false;
};

/// Appends rows to a file as JSON.
class RowWriter {
 public:
  RowWriter(const Trajectories& trajectories, const TokenDistributions& computed, at::ScalarType dtype)
      : trajectories_(trajectories), computed_(computed), is_double_(dtype == at::kDouble) {}

  void write(int64_t row, AtomicFile* file) const {
    const bool named = !trajectories_.trajectory_id.empty() && !trajectories_.trajectory_id[row].empty();
    const nlohmann::json id = named ? nlohmann::json(trajectories_.trajectory_id[row]) : nlohmann::json(row);
    std::string line = fmt::format("{{\"trajectory_id\":{}", id.dump());
    append_numbers(row, "logprobs", computed_.logprobs, &line);
    if (!computed_.entropies.empty()) append_numbers(row, "entropies", computed_.entropies, &line);
    if (!computed_.top_row.empty()) append_top(row, &line);
    line += "}\n";
    file->write(line);
  }

 private:
  /// Numbers with a comma before each. Float32 values are printed with no more digits than they have.
  std::string numbers(std::span<const double> values) const {
    std::string text;
    for (const double value : values) {
      text += is_double_ ? fmt::format(",{}", value) : fmt::format(",{}", static_cast<float>(value));
    }
    return text;
  }

  void append_numbers(int64_t row, const char* field, const std::vector<double>& values,
                      std::string* line) const {
    const auto rest =
        std::span(values).subspan(trajectories_.offsets[row] + 1, trajectories_.row_size(row) - 1);
    *line += fmt::format(",\"{}\":[null{}]", field, numbers(rest));
  }

  /// One list per token; that of the first token is empty.
  void append_top(int64_t row, std::string* line) const {
    std::string ids = "[]", logprobs = "[]";
    for (int64_t t = 1; t < trajectories_.row_size(row); ++t) {
      const int64_t at = computed_.top_row[trajectories_.offsets[row] + t], k = computed_.top_ids.size(1);
      const std::span own(computed_.top_ids.const_data_ptr<int64_t>() + at * k, k);
      ids += fmt::format(",[{}]", fmt::join(own, ","));
      const std::span values(computed_.top_logprobs.const_data_ptr<double>() + at * k, k);
      logprobs += fmt::format(",[{}]", numbers(values).substr(1));
    }
    *line += fmt::format(",\"topk_ids\":[{}],\"topk_logprobs\":[{}]", ids, logprobs);
  }

  const Trajectories& trajectories_;
  const TokenDistributions& computed_;
  bool is_double_;
};

/// Throws if a row already has the fields that --as-reference writes.
void check_as_reference(const LogprobsArguments& flags, const Trajectories& trajectories) {
  ESPALIER_CHECK(!flags.distribution.entropies,
                 "--as-reference: cannot be combined with --entropies, because rows have no such field");
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    ESPALIER_CHECK(
        !trajectories.ref_logprobs.has(row) && trajectories.ref_topk == 0,
        "trajectory {} (row {}) has `{}` already: expected none with --as-reference, which writes them",
        trajectories.name(row), row, trajectories.ref_topk == 0 ? "ref_logprobs" : "ref_topk_ids");
  }
}

RealColumn column_of(const std::vector<double>& values, bool is_double) {
  if (is_double) return Column<double>(values);
  return Column<float>(std::vector<float>(values.begin(), values.end()));
}

void set_ref_topk(const TokenDistributions& computed, bool is_double, Trajectories* trajectories) {
  TopTokens top = top_tokens(computed);
  trajectories->ref_topk = computed.top_ids.size(1);
  trajectories->ref_topk_ids = Column<int32_t>(std::move(top.ids));
  trajectories->ref_topk_logprobs = column_of(top.logprobs, is_double);
}

/// Writes the rows of the data with the computed values as those of a reference model.
void write_as_reference(const std::string& path, const TokenDistributions& computed, bool is_double,
                        Trajectories trajectories) {
  trajectories.ref_logprobs = {column_of(computed.logprobs, is_double), {}};
  if (!computed.top_row.empty()) set_ref_topk(computed, is_double, &trajectories);
  write_trajectories(path, trajectories);
}

void write_listing(const std::string& path, const Trajectories& trajectories,
                   const TokenDistributions& computed, at::ScalarType dtype) {
  AtomicFile file(path);
  const RowWriter writer(trajectories, computed, dtype);
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) writer.write(row, &file);
  file.commit();
}

void run_logprobs(const LogprobsArguments& flags) {
  const auto [device, kernels] = flags.device.open(*flags.group);
  const KernelScope scope(kernels);
  const at::ScalarType dtype = flags.dtype;
  const DataUse use = data_use_of(flags.model);
  ESPALIER_CHECK(flags.distribution.top_k <= use.vocab_size,
                 "--top-k {}: expected at most the model's vocab_size, {}", flags.distribution.top_k,
                 use.vocab_size);
  const Trajectories trajectories = flags.data.read(use);
  if (flags.as_reference) check_as_reference(flags, trajectories);
  note_carried_tensors(flags.model);
  const Decoder decoder = load_adapted(flags.model, flags.adapter, dtype, device);
  const PlanCosts costs{assumed_times(decoder.config(), device),
                        memory_model(decoder.config(), dtype, *make_objective(ObjectiveOptions{}), device)};
  const Step step =
      make_step(trajectories,
                {.plan = flags.planning.options(trajectories), .costs = &costs, .terms = TermChoice::kAll});
  Progress progress("logprobs");
  const TokenDistributions computed = compute_distributions(
      decoder, trajectories, step, flags.distribution,
      [&](int64_t done, int64_t total) {
        progress.update(static_cast<double>(done) / static_cast<double>(total));
      },
      *flags.group);
  if (!flags.group->is_first()) return;
  check_finite(trajectories, computed.logprobs);
  if (flags.distribution.entropies) check_finite(trajectories, computed.entropies, "entropy");
  if (flags.as_reference) {
    write_as_reference(flags.out, computed, dtype == at::kDouble, trajectories);
  } else {
    write_listing(flags.out, trajectories, computed, dtype);
  }
  print_output(
      "{}: {}, {} from {} encoded\n", printable(flags.out), count_of(trajectories.num_rows(), "row", "rows"),
      count_of(trajectories.num_tokens(), "flat token", "flat tokens"), with_commas(step.plan.num_tokens()));
}

}  // namespace

Command logprobs_command(const Group* group) {
  const auto flags = std::make_shared<LogprobsArguments>();
  if (group != nullptr) flags->group = group;
  Command command{
      .name = "logprobs",
      .summary = kSummaryOfLogprobs,
      .closing =
          "The output has the rows of the data, in the same order. Fields, with an entry for each token:\n"
          "  logprobs       null for the first token, which nothing predicts\n"
          "  entropies      with --entropies: of the distribution that the token is drawn from, in nats; "
          "null for the first\n"
          "  topk_ids       with --top-k K: the K most likely token ids at that place, in descending order; "
          "[] for the first\n"
          "  topk_logprobs  their log-probabilities\n"
          "With --as-reference it has the complete rows of the data, for train and verify, with ref_logprobs "
          "and with --top-k also ref_topk_ids and ref_topk_logprobs.\n\nExample, distillation:\n"
          "  espalier logprobs --model TEACHER --data rows.jsonl --as-reference --top-k 64 -o taught.jsonl\n"
          "  espalier train --model DIR --data taught.jsonl --objective opd --ref-topk rest --out run",
      .run = [flags](const OptionList&) {
        run_logprobs(*flags);
        return 0;
      }};
  OptionList& list = command.options;
  add_model(&list, &flags->model);
  add_adapter(&list, &flags->adapter, "Adapter of the model, a PEFT folder");
  flags->data.add(&list);
  list.group(kOutputGroup);
  list.add("out", &flags->out,
           "JSONL file to write: trajectory_id (or row number), logprobs (the first null), and what other "
           "flags add; with --as-reference also packed .safetensors",
           {.letter = 'o', .path = PathKind::kFile, .required = true});
  list.add("entropies", &flags->distribution.entropies,
           "Write the entropy of each token's distribution, in nats, at the same temperature");
  list.add("top-k", &flags->distribution.top_k,
           "Write this many of the most likely tokens of each distribution and their "
           "log-probabilities (0: none)",
           {.least = 0});
  list.add("as-reference", &flags->as_reference,
           "Write the rows of the data with the log-probabilities as those of a reference or teacher: "
           "ref_logprobs, and with --top-k also ref_topk_ids and ref_topk_logprobs");
  add_dtype(&list, "dtype", &flags->dtype, "Precision to compute in");
  list.add("temperature", &flags->distribution.temperature,
           "Divide logits by this, for rows that were sampled at a temperature other than 1",
           {.least = kLeastTemperature, .group = kDataGroup});
  flags->device.add(&list, /*trains=*/false);
  flags->planning.add(&list);
  add_threads(&list);
  return command;
}

}  // namespace espalier::cli
