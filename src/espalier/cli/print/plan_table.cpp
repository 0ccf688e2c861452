// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/plan_table.h"

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/runtime/progress.h"

namespace espalier::cli {
namespace {

std::string totals(const Forest& forest, const Plan& plan) {
  const double flat = static_cast<double>(forest.flat_tokens());
  const double por = flat == 0 ? 0 : 1 - static_cast<double>(forest.tree_tokens()) / flat;
  std::string text =
      fmt::format("{} with {}", to_string(plan.options.strategy),
                  count_of(static_cast<int64_t>(plan.micro_batches.size()), "micro-batch", "micro-batches"));
  if (plan.options.token_budget > 0) {
    text += fmt::format(" of {} at most", count_of(plan.options.token_budget, "token", "tokens"));
  }
  if (plan.options.checkpoint_activations != CheckpointActivations::kNone) {
    text += fmt::format(", activations checkpointed by {}", to_string(plan.options.checkpoint_activations));
  }
  return text + fmt::format(": {}, {}, {} encoded (POR {:.4f}, ERR {:.4f})\n",
                            count_of(forest.flat_tokens(), "flat token", "flat tokens"),
                            count_of(forest.tree_tokens(), "tree token", "tree tokens"),
                            with_commas(plan.num_tokens()), por, effective_reuse_ratio(forest, plan));
}

}  // namespace

std::string seconds_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.1f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

std::string recomputation(const Plan& plan) {
  const std::vector<Load> loads = loads_of(plan.micro_batches);
  int64_t tokens = 0;
  for (const Load& load : loads) {
    if (plan.options.checkpoint_activations == CheckpointActivations::kLayer ||
        (plan.options.checkpoint_activations == CheckpointActivations::kPiece && load.has_readers())) {
      tokens += load.tokens;
    }
  }
  if (tokens == 0) return "";
  const double share = static_cast<double>(tokens) / static_cast<double>(plan.num_tokens());
  return fmt::format("runs {} through the forward pass twice: about {:.0f}% more time",
                     count_of(tokens, "token", "tokens"), share * 100 / 3);
}

std::string PlanTable::rows() const {
  std::vector<const MicroBatchMeasure*> measure_of(plan->micro_batches.size());
  if (measured != nullptr) {
    for (const MicroBatchMeasure& measure : measured->measured) measure_of[measure.micro_batch] = &measure;
  }
  std::string text = fmt::format("{:>11}  {:>7}  {:>10}  {:>14}  {:>12}  {:>8}", "micro-batch", "parent",
                                 "tokens", "visible pairs", "trajectories", "runs");
  if (prediction != nullptr) text += fmt::format("  {:>10}  {:>10}", "time", "memory");
  if (measured != nullptr) text += fmt::format("  {:>10}  {:>10}", "measured", "measured");
  text += "\n";
  const auto shown = std::min(max_rows, static_cast<int64_t>(plan->micro_batches.size()));
  for (int64_t m = 0; m < shown; ++m) {
    const MicroBatch& micro_batch = plan->micro_batches[m];
    text += fmt::format("{:>11}  {:>7}  {:>10}  {:>14}  {:>12}  {:>8}", m,
                        micro_batch.parent < 0 ? "-" : std::to_string(micro_batch.parent),
                        with_commas(micro_batch.num_tokens), with_commas(micro_batch.num_pairs),
                        with_commas(static_cast<int64_t>(micro_batch.trajectories.size())),
                        with_commas(static_cast<int64_t>(micro_batch.runs.size())));
    if (prediction != nullptr) {
      text += fmt::format("  {:>10}  {:>10}", seconds_text(prediction->seconds[m]),
                          human_bytes(prediction->peak_bytes[m]));
    }
    if (measure_of[m] != nullptr) {
      text += fmt::format("  {:>10}  {:>10}", seconds_text(measure_of[m]->seconds),
                          human_bytes(static_cast<double>(measure_of[m]->peak_bytes)));
    }
    text += "\n";
  }
  if (shown < static_cast<int64_t>(plan->micro_batches.size())) {
    text += fmt::format("{:>11}  and {} more\n", "...",
                        with_commas(static_cast<int64_t>(plan->micro_batches.size()) - shown));
  }
  return text;
}

std::string PlanTable::text() const {
  std::string text = rows() + totals(*forest, *plan);
  if (const std::string twice = recomputation(*plan); !twice.empty()) {
    text += fmt::format("checkpointing {}\n", twice);
  }
  if (prediction != nullptr && prediction->logprob_pass_seconds > 0) {
    text += fmt::format("log-probabilities are computed in a separate pass first: predicted {}{}\n",
                        seconds_text(prediction->logprob_pass_seconds),
                        measured != nullptr && measured->logprob_pass
                            ? ", measured " + seconds_text(measured->logprob_pass->seconds)
                            : "");
  }
  if (prediction != nullptr) {
    text +=
        fmt::format("predicted: {} for forward and backward, {} at most",
                    seconds_text(prediction->total_seconds()), human_bytes(prediction->largest_peak_bytes()));
    if (measured != nullptr) {
      text += fmt::format("; measured: {}, {}", seconds_text(measured->measured_seconds()),
                          human_bytes(static_cast<double>(measured->measured_peak_bytes())));
    }
    text += "\n";
  }
  return text;
}

nlohmann::ordered_json micro_batches_json(const Plan& plan, const StepPrediction* prediction) {
  auto json = nlohmann::ordered_json::array();
  for (size_t m = 0; m < plan.micro_batches.size(); ++m) {
    const MicroBatch& micro_batch = plan.micro_batches[m];
    nlohmann::ordered_json runs = nlohmann::ordered_json::array();
    for (const Run& run : micro_batch.runs) runs.push_back({run.begin, run.end, run.parent});
    nlohmann::ordered_json trajectories = nlohmann::ordered_json::array();
    for (const Placement& placement : micro_batch.trajectories) {
      trajectories.push_back({{"trajectory", placement.trajectory}, {"run", placement.run}});
    }
    nlohmann::ordered_json entry = {{"tokens", micro_batch.num_tokens},
                                    {"visible_pairs", micro_batch.num_pairs},
                                    {"parent", micro_batch.parent},
                                    {"context_runs", micro_batch.context_runs}};
    if (prediction != nullptr) {
      entry["predicted_seconds"] = prediction->seconds[m];
      entry["predicted_peak_bytes"] = prediction->peak_bytes[m];
    }
    entry["trajectories"] = std::move(trajectories);
    entry["runs"] = std::move(runs);
    json.push_back(std::move(entry));
  }
  return json;
}

}  // namespace espalier::cli
