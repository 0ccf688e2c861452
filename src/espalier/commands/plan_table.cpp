// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/plan_table.h"

#include <algorithm>

namespace espalier::commands {

int64_t recomputed_tokens(const Plan& plan) {
  int64_t tokens = 0;
  for (const Load& load : loads_of(plan.micro_batches)) {
    if (plan.options.checkpoint_activations == CheckpointActivations::kLayer ||
        (plan.options.checkpoint_activations == CheckpointActivations::kPiece && load.has_readers())) {
      tokens += load.tokens;
    }
  }
  return tokens;
}

nlohmann::ordered_json micro_batches_json(const Plan& plan, const StepPrediction* prediction, int64_t most) {
  auto json = nlohmann::ordered_json::array();
  for (size_t m = 0; m < plan.micro_batches.size() && std::ssize(json) < most; ++m) {
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

nlohmann::ordered_json table_json(const Step& step, const StepPrediction* prediction,
                                  const StepMeasures* measured, int64_t max_rows) {
  const Plan& plan = step.plan;
  auto rows = micro_batches_json(plan, prediction, max_rows);
  nlohmann::ordered_json json = {{"micro_batches", plan.micro_batches.size()},
                                 {"strategy", to_string(plan.options.strategy)},
                                 {"token_budget", plan.options.token_budget},
                                 {"checkpoint_activations", to_string(plan.options.checkpoint_activations)},
                                 {"flat_tokens", step.forest.flat_tokens()},
                                 {"tree_tokens", step.forest.tree_tokens()},
                                 {"encoded_tokens", plan.num_tokens()},
                                 {"effective_reuse_ratio", effective_reuse_ratio(step.forest, plan)},
                                 {"recomputed_tokens", recomputed_tokens(plan)}};
  if (prediction != nullptr) {
    json["predicted"] = {prediction->total_seconds(), prediction->largest_peak_bytes()};
    json["logprob_pass"] = {prediction->logprob_pass_seconds};
  }
  if (measured != nullptr) {
    for (const MicroBatchMeasure& each : measured->measured) {
      if (each.micro_batch >= max_rows) continue;
      rows[each.micro_batch]["measured_seconds"] = each.seconds;
      rows[each.micro_batch]["measured_peak_bytes"] = each.peak_bytes;
    }
    json["measured"] = {measured->measured_seconds(), measured->measured_peak_bytes()};
    if (measured->logprob_pass) json["logprob_pass"].push_back(measured->logprob_pass->seconds);
  }
  json["rows"] = std::move(rows);
  return json;
}

}  // namespace espalier::commands
