// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/plan_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "espalier/commands/plan_table.h"
#include "espalier/engine/step_cost.h"
#include "espalier/tree/forest.h"

namespace espalier::commands {
namespace {

nlohmann::ordered_json candidate_json(const Candidate& candidate, const StepPrediction* prediction) {
  nlohmann::ordered_json json = {
      {"strategy", to_string(candidate.options.strategy)},
      {"checkpoint_activations", to_string(candidate.options.checkpoint_activations)},
      {"fits", candidate.plan.has_value()}};
  if (candidate.plan) {
    json["token_budget"] = candidate.plan->options.token_budget;
    json["micro_batches"] = candidate.plan->micro_batches.size();
    json["encoded_tokens"] = candidate.plan->num_tokens();
  }
  if (prediction != nullptr) {
    json["predicted_seconds"] = prediction->total_seconds();
    json["predicted_peak_bytes"] = prediction->largest_peak_bytes();
    json["compared_seconds"] = candidate.price.seconds;
    json["compared_peak_bytes"] = candidate.price.bytes;
  }
  if (candidate.least_tokens > 0) json["smallest_token_budget"] = candidate.least_tokens;
  if (candidate.least_bytes > 0) {
    json["smallest_memory_budget"] = static_cast<int64_t>(std::ceil(candidate.least_bytes));
  }
  return json;
}

}  // namespace

std::vector<std::optional<StepPrediction>> predict_candidates(const PlanCosts& costs,
                                                              ComparedStep* compared) {
  std::vector<std::optional<StepPrediction>> predictions;
  for (const Candidate& candidate : compared->plans.candidates) {
    predictions.emplace_back();
    if (!candidate.plan) continue;
    set_plan(&compared->step, *candidate.plan);
    predictions.back() = predict_step(costs, compared->step);
  }
  set_plan(&compared->step, *compared->plans.candidates[compared->plans.chosen].plan);
  return predictions;
}

std::string way_text(const PlanOptions& way) {
  if (way.checkpoint_activations == CheckpointActivations::kNone) return to_string(way.strategy);
  return fmt::format("{}, activations checkpointed by {}", to_string(way.strategy),
                     to_string(way.checkpoint_activations));
}

const StepPrediction* PlanSummary::chosen_prediction() const {
  return predictions.empty() ? nullptr : &*predictions[plans->chosen];
}

nlohmann::ordered_json PlanSummary::asked_json() const {
  const Forest& forest = step->forest;
  const std::set<int64_t> ends(forest.end_node.begin(), forest.end_node.end());
  return {{"strategy", to_string(asked.strategy)},
          {"memory_budget", asked.memory_budget},
          {"offload_context", step->plan.options.offload_context},
          {"recomputed_tokens", recomputed_tokens(step->plan)},
          {"calibrated", calibrated},
          {"rows", forest.num_trajectories()},
          {"different", ends.size()},
          {"trees", forest_statistics(forest).num_trees}};
}

nlohmann::ordered_json PlanSummary::json() const {
  const Forest& forest = step->forest;
  const Plan& plan = step->plan;
  nlohmann::ordered_json json = {{"strategy", to_string(plan.options.strategy)},
                                 {"token_budget", plan.options.token_budget},
                                 {"memory_budget", plan.options.memory_budget},
                                 {"checkpoint_activations", to_string(plan.options.checkpoint_activations)},
                                 {"flat_tokens", forest.flat_tokens()},
                                 {"tree_tokens", forest.tree_tokens()},
                                 {"encoded_tokens", plan.num_tokens()},
                                 {"visible_pairs", plan.num_pairs()},
                                 {"effective_reuse_ratio", effective_reuse_ratio(forest, plan)},
                                 {"predicted_speedup_over_sequence_packing", gains.over_packing},
                                 {"predicted_speedup_over_append_only", gains.over_append_only},
                                 {"prediction_counts", gains.in_flops ? "FLOPs" : "tokens"}};
  if (flops) {
    json["flops"] = {{"plan", flops->plan},
                     {"sequence_packing", flops->sequence_packing},
                     {"append_only", flops->append_only}};
  }
  const StepPrediction* prediction = chosen_prediction();
  if (prediction != nullptr) {
    json["predicted_seconds"] = prediction->total_seconds();
    json["predicted_peak_bytes"] = prediction->largest_peak_bytes();
  }
  json["comparison"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < plans->candidates.size(); ++i) {
    nlohmann::ordered_json entry = candidate_json(
        plans->candidates[i], predictions.empty() || !predictions[i] ? nullptr : &*predictions[i]);
    entry["chosen"] = i == plans->chosen;
    json["comparison"].push_back(std::move(entry));
  }
  return json;
}

void StepFlops::add(const ModelCost& model, const Step& step) {
  *this += loss_flops(model, step);
}

}  // namespace espalier::commands
