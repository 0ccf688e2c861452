// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/plan_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "espalier/base/units.h"
#include "espalier/cli/print/plan_table.h"
#include "espalier/engine/step_cost.h"
#include "espalier/tree/forest.h"

namespace espalier::cli {
namespace {

// The note about a faster candidate needs a time below this fraction of the chosen plan's.
constexpr double kClearlyFaster = 0.98;

void add_row(std::string* out, const char* name, const std::string& value) {
  fmt::format_to(std::back_inserter(*out), "{:<20}{}\n", name, value);
}

std::string rows_text(const Forest& forest) {
  const std::set<int64_t> ends(forest.end_node.begin(), forest.end_node.end());
  return fmt::format(
      "{}: {} in {}", with_commas(forest.num_trajectories()),
      count_of(static_cast<int64_t>(ends.size()), "different trajectory", "different trajectories"),
      count_of(forest_statistics(forest).num_trees, "tree", "trees"));
}

std::string checkpointing_text(const Plan& plan) {
  std::string text = to_string(plan.options.checkpoint_activations);
  if (plan.options.offload_context) text += ", context in host memory";
  const std::string twice = recomputation(plan);
  return twice.empty() ? text : fmt::format("{}, which {}", text, twice);
}

const char* chosen_by(const PlanOptions& asked) {
  return asked.strategy == Strategy::kAuto ? "chosen by auto" : "given by --strategy";
}

std::string chosen_text(const Plan& plan, const PlanOptions& asked) {
  return fmt::format("{}, {}", to_string(plan.options.strategy), chosen_by(asked));
}

// Whether candidates may differ in activation checkpointing.
bool shows_checkpointing(const PlanComparison& plans) {
  return std::any_of(plans.candidates.begin(), plans.candidates.end(), [](const Candidate& candidate) {
    return candidate.options.checkpoint_activations != CheckpointActivations::kNone;
  });
}

std::string fits_text(const Candidate& candidate) {
  if (candidate.plan) return "yes";
  if (candidate.least_tokens > 0) return fmt::format("no: needs --token-budget {}", candidate.least_tokens);
  return fmt::format("no: needs --memory-budget {}", memory_budget_text(candidate.least_bytes));
}

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

std::string totals_text(const PlanSummary& summary) {
  const Forest& forest = summary.step->forest;
  const Plan& plan = summary.step->plan;
  std::string text;
  add_row(&text, "rows", rows_text(forest));
  add_row(&text, "flat tokens", with_commas(forest.flat_tokens()));
  add_row(&text, "tree tokens", with_commas(forest.tree_tokens()));
  add_row(&text, "encoded tokens", with_commas(plan.num_tokens()));
  add_row(&text, "strategy", chosen_text(plan, summary.asked));
  add_row(&text, "token budget",
          plan.options.token_budget == 0
              ? "none"
              : count_of(plan.options.token_budget, "token", "tokens") + " in a micro-batch at most");
  if (summary.asked.memory_budget > 0) {
    add_row(&text, "memory budget", human_bytes(static_cast<double>(summary.asked.memory_budget)));
  }
  add_row(&text, "checkpointing", checkpointing_text(plan));
  add_row(&text, "micro-batches", with_commas(static_cast<int64_t>(plan.micro_batches.size())));
  if (const StepPrediction* prediction = summary.chosen_prediction()) {
    add_row(&text, "predicted time",
            fmt::format("{} for forward and backward of a step{}", seconds_text(prediction->total_seconds()),
                        summary.calibrated ? "" : ", by built-in rates"));
    add_row(&text, "predicted memory", human_bytes(prediction->largest_peak_bytes()) + " at most");
  }
  return text;
}

std::string comparison_table(const PlanSummary& summary) {
  const PlanComparison& plans = *summary.plans;
  const bool checkpoints = shows_checkpointing(plans), budgets = summary.asked.memory_budget > 0;
  const bool predicted = !summary.predictions.empty();
  std::string text = fmt::format("  {:<16}", "strategy");
  if (checkpoints) text += fmt::format("  {:<13}", "checkpointing");
  if (budgets) text += fmt::format("  {:>12}", "token budget");
  text += fmt::format("  {:>13}  {:>14}", "micro-batches", "encoded tokens");
  if (predicted) text += fmt::format("  {:>10}  {:>10}", "time", "memory");
  text += "  fits\n";
  for (size_t i = 0; i < plans.candidates.size(); ++i) {
    const Candidate& candidate = plans.candidates[i];
    const Plan* plan = candidate.plan ? &*candidate.plan : nullptr;
    const auto number = [&](int64_t value) { return plan == nullptr ? "-" : with_commas(value); };
    text += fmt::format("{} {:<16}", i == plans.chosen ? '*' : ' ', to_string(candidate.options.strategy));
    if (checkpoints) text += fmt::format("  {:<13}", to_string(candidate.options.checkpoint_activations));
    if (budgets) text += fmt::format("  {:>12}", number(plan == nullptr ? 0 : plan->options.token_budget));
    text += fmt::format("  {:>13}  {:>14}",
                        number(plan == nullptr ? 0 : static_cast<int64_t>(plan->micro_batches.size())),
                        number(plan == nullptr ? 0 : plan->num_tokens()));
    if (predicted) {
      const auto& prediction = summary.predictions[i];
      text += fmt::format("  {:>10}  {:>10}", prediction ? seconds_text(prediction->total_seconds()) : "-",
                          prediction ? human_bytes(prediction->largest_peak_bytes()) : "-");
    }
    text += "  " + fits_text(candidate) + "\n";
  }
  return text;
}

// Plans are compared by built-in rates and times predicted by measured ones, so the choice may look wrong.
std::string faster_note(const PlanSummary& summary) {
  if (summary.predictions.empty() || !summary.calibrated) return "";
  const std::vector<Candidate>& candidates = summary.plans->candidates;
  const double chosen = summary.chosen_prediction()->total_seconds();
  size_t fastest = summary.plans->chosen;
  double least = kClearlyFaster * chosen;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Strategy strategy = candidates[i].options.strategy;
    const bool open = summary.asked.strategy == Strategy::kAuto || summary.asked.strategy == strategy;
    if (!open || !summary.predictions[i] || summary.predictions[i]->total_seconds() >= least) continue;
    fastest = i;
    least = summary.predictions[i]->total_seconds();
  }
  if (fastest == summary.plans->chosen) return "";
  return fmt::format(
      "By the rates measured on this machine, {} is the fastest: {}.\n"
      "Plans are compared by built-in rates, or those of --cost-model, so that the choice is the same on "
      "every machine.\n"
      "--save-cost-model writes the measured rates to a file for --cost-model.\n",
      way_text(candidates[fastest].options), seconds_text(least));
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

std::string memory_budget_text(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  // Rounding up keeps four or five digits, so that the budget is hardly larger than needed.
  while (bytes >= 10'240 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.0f}{}", std::ceil(bytes), units[unit]);
}

const StepPrediction* PlanSummary::chosen_prediction() const {
  return predictions.empty() ? nullptr : &*predictions[plans->chosen];
}

std::string PlanSummary::text() const {
  return fmt::format("{}\n{}\nstrategies (* {})\n{}{}", totals_text(*this),
                     gains_report(gains, !predictions.empty()), chosen_by(asked), comparison_table(*this),
                     faster_note(*this));
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
  json["micro_batches"] = micro_batches_json(plan, prediction);
  return json;
}

void StepFlops::add(const ModelCost& model, const Step& step) {
  *this += loss_flops(model, step);
}

}  // namespace espalier::cli
