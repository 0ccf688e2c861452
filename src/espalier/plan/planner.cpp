// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/planner.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/option_names.h"
#include "espalier/base/units.h"
#include "espalier/plan/packing.h"
#include "espalier/plan/partition.h"

namespace espalier {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_token_budget(const Forest& forest, int64_t budget) {
  const int64_t smallest = longest_trajectory(forest);
  if (smallest <= budget) return;
  int64_t r = 0;
  while (forest.trajectory_size(r) <= budget) ++r;
  throw InputError(fmt::format(
      "trajectory {} has {} tokens, more than the token budget {}: expected a budget of at least {}, the "
      "longest trajectory, or {}, which cuts trajectories",
      r, forest.trajectory_size(r), budget, smallest, named("strategy", "partition")));
}

// The strategy's plans under one token budget, at least one of them.
std::vector<Plan> plans_within(const Forest& forest, PlanOptions options, int64_t token_budget) {
  options.token_budget = token_budget == kNoLimit ? 0 : token_budget;
  std::vector<Plan> plans;
  switch (options.strategy) {
    case Strategy::kTreePacking:
      plans.push_back({options, pack_trees(forest, token_budget)});
      break;
    case Strategy::kAppendOnly:
      plans.push_back({options, pack_leaf_paths(forest, token_budget)});
      break;
    case Strategy::kSequencePacking:
      plans.push_back({options, pack_sequences(forest, token_budget)});
      break;
    default:
      for (const Merge merge : {Merge::kLeaves, Merge::kAll}) {
        plans.push_back({options, partition(forest, token_budget, merge)});
      }
  }
  return plans;
}

// The smallest token budget worth trying. Packing needs the longest trajectory. Partition could use a single
// token, but the weights, and the longest trajectory while its last micro-batch runs, are in memory under any
// budget. Micro-batches that need less than a hundredth of that gain nothing by being smaller.
int64_t smallest_token_budget(const Forest& forest, const PlanOptions& options, const PlanCosts& costs) {
  const int64_t longest = longest_trajectory(forest);
  if (options.strategy != Strategy::kPartition) return longest;
  MemoryModel memory = costs.memory;
  memory.checkpoint_activations = options.checkpoint_activations;
  const auto load = [](int64_t tokens) {
    return Load{.tokens = tokens, .logit_rows = tokens, .terms = tokens};
  };
  const auto running = [&](int64_t tokens) { return running_bytes(memory, load(tokens), true); };
  const double always = resident_bytes(memory) + held_bytes(memory, load(longest));
  int64_t budget = 1;
  while (budget < longest && running(2 * budget) - running(1) < always / 100) budget *= 2;
  return budget;
}

// The token budgets worth trying, largest first. The first is the given one or the whole forest. Each further
// one is four fifths of the one before, down to the smallest.
std::vector<int64_t> token_budgets(const Forest& forest, const PlanOptions& options, const PlanCosts& costs) {
  const bool shares = options.strategy == Strategy::kPartition || options.strategy == Strategy::kTreePacking;
  const int64_t whole = std::max<int64_t>(1, shares ? forest.tree_tokens() : forest.flat_tokens());
  const int64_t largest = options.token_budget > 0 ? std::min(options.token_budget, whole) : whole;
  const int64_t smallest = std::min(largest, smallest_token_budget(forest, options, costs));
  std::vector<int64_t> budgets;
  for (int64_t budget = largest; budget > smallest; budget -= std::max<int64_t>(1, budget / 5)) {
    budgets.push_back(budget);
  }
  budgets.push_back(smallest);
  return budgets;
}

// Makes `plan` the candidate's plan if it is cheaper; of plans of equal price the first is kept.
void offer(Candidate* candidate, Plan plan, const PlanPrice& price) {
  if (candidate->plan && price.seconds >= candidate->price.seconds) return;
  candidate->plan = std::move(plan);
  candidate->price = price;
}

// Tracks the best candidate.
struct BestChoice {
  std::optional<double> seconds;   // of the best candidate's plan
  double least_bytes = kInfinity;  // the minimum over all candidates

  // Whether the candidate is better than all previous ones.
  bool prefers(const Candidate& candidate) {
    if (candidate.least_bytes > 0) least_bytes = std::min(least_bytes, candidate.least_bytes);
    if (!candidate.plan) return false;
    if (seconds && std::max(candidate.price.seconds, candidate.least_seconds) >= *seconds) return false;
    seconds = candidate.price.seconds;
    return true;
  }
};

// Called before each plan is made, with the finished fraction of the search.
using SearchProgress = std::function<void(double fraction)>;

// Searches for a candidate's plans under a memory budget. Planning a large forest is slow, so few token
// budgets are tried: strides find one that fits, and bisection finds the largest between the last two
// strides. The strides do not depend on the memory budget, so a plan of `least_bytes` is found again if the
// memory budget is exactly that.
class MemorySearch {
 public:
  MemorySearch(const Forest& forest, const PlanOptions& way, const PlanCosts& costs,
               const SearchProgress& progress)
      : forest_(forest),
        costs_(costs),
        progress_(progress),
        budgets_(token_budgets(forest, way, costs)),
        known_(budgets_.size()),
        candidate_{.options = way, .least_bytes = kInfinity} {}

  // Stops if no plan of this candidate is expected to beat one of `rival_seconds`.
  Candidate run(std::optional<double> rival_seconds) {
    const size_t last = budgets_.size() - 1;
    size_t begin = 0, fit = 0;
    while (!try_at(fit)) {
      candidate_.least_seconds = std::max(candidate_.least_seconds, seconds_);
      const bool beaten = rival_seconds && candidate_.least_seconds >= *rival_seconds;
      if (fit == last || beaten) return std::move(candidate_);
      begin = fit + 1;
      fit = std::min(fit + kStride, last);
    }
    while (begin < fit) {
      const size_t middle = (begin + fit) / 2;
      if (try_at(middle)) {
        fit = middle;
      } else {
        begin = middle + 1;
      }
    }
    // Smaller micro-batches take longer, so it is enough to try a few budgets below the first that fits.
    for (size_t i = fit + 1; i <= std::min(fit + kStepsPastTheFirstFit, last); ++i) try_at(i);
    return std::move(candidate_);
  }

 private:
  static constexpr size_t kStride = 8, kBisections = 3, kStepsPastTheFirstFit = 3;

  bool try_at(size_t i) {
    if (known_[i]) return *known_[i];
    known_[i] = false;
    const size_t most = known_.size() / kStride + 1 + kBisections + kStepsPastTheFirstFit;
    if (progress_) progress_(std::min(1.0, static_cast<double>(num_tried_++) / static_cast<double>(most)));
    seconds_ = kInfinity;
    for (Plan& plan : plans_within(forest_, candidate_.options, budgets_[i])) {
      const PlanPrice predicted = price(costs_, plan);
      candidate_.least_bytes = std::min(candidate_.least_bytes, predicted.bytes);
      seconds_ = std::min(seconds_, predicted.seconds);
      if (predicted.bytes > static_cast<double>(candidate_.options.memory_budget)) continue;
      offer(&candidate_, std::move(plan), predicted);
      known_[i] = true;
    }
    return *known_[i];
  }

  const Forest& forest_;
  const PlanCosts& costs_;
  const SearchProgress& progress_;
  const std::vector<int64_t> budgets_;
  std::vector<std::optional<bool>> known_;
  double seconds_ = 0;  // of the fastest plan at the token budget tried last
  size_t num_tried_ = 0;
  Candidate candidate_;
};

// The candidate's fastest plan that fits, or none if it is not expected to beat one of `rival_seconds`.
Candidate candidate_of(const Forest& forest, const PlanOptions& way, const PlanCosts& costs,
                       std::optional<double> rival_seconds, const SearchProgress& progress = {}) {
  const int64_t longest = longest_trajectory(forest);
  if (way.strategy != Strategy::kPartition && way.token_budget > 0 && way.token_budget < longest) {
    return {.options = way, .least_tokens = longest};
  }
  if (way.memory_budget > 0) return MemorySearch(forest, way, costs, progress).run(rival_seconds);
  if (progress) progress(0);
  Candidate candidate{.options = way};
  for (Plan& plan : plans_within(forest, way, way.token_budget > 0 ? way.token_budget : kNoLimit)) {
    const PlanPrice predicted = price(costs, plan);
    offer(&candidate, std::move(plan), predicted);
  }
  return candidate;
}

std::vector<Strategy> strategies_of(const PlanOptions& options) {
  if (options.strategy != Strategy::kAuto) return {options.strategy};
  return {Strategy::kTreePacking, Strategy::kPartition, Strategy::kSequencePacking};
}

std::vector<CheckpointActivations> checkpoints_of(const PlanOptions& options, Strategy strategy) {
  const CheckpointActivations given = options.checkpoint_activations;
  const bool cuts = strategy == Strategy::kPartition;
  if (given == CheckpointActivations::kAuto && options.memory_budget > 0) {
    std::vector<CheckpointActivations> all{CheckpointActivations::kNone, CheckpointActivations::kLayer};
    if (cuts) all.push_back(CheckpointActivations::kPiece);
    return all;
  }
  // Packed micro-batches have no descendants, so `piece` means the same as `none`.
  const bool none =
      given == CheckpointActivations::kAuto || (given == CheckpointActivations::kPiece && !cuts);
  return {none ? CheckpointActivations::kNone : given};
}

// The combinations of strategy and checkpointing that the options allow.
std::vector<PlanOptions> ways_of(const PlanOptions& options) {
  std::vector<PlanOptions> ways;
  for (const Strategy strategy : strategies_of(options)) {
    for (const CheckpointActivations checkpoint : checkpoints_of(options, strategy)) {
      PlanOptions& way = ways.emplace_back(options);
      way.strategy = strategy;
      way.checkpoint_activations = checkpoint;
      way.offload_context = options.offload_context && strategy == Strategy::kPartition;
    }
  }
  return ways;
}

void check_options(const Forest& forest, const PlanOptions& options) {
  ESPALIER_CHECK(options.token_budget >= 0,
                 "token budget: expected at least 1, or 0 for no limit, received {}", options.token_budget);
  ESPALIER_CHECK(options.memory_budget >= 0,
                 "memory budget: expected a number of bytes, or 0 for no limit, received {}",
                 options.memory_budget);
  const bool cuts = options.strategy == Strategy::kPartition || options.strategy == Strategy::kAuto;
  ESPALIER_CHECK(cuts || options.checkpoint_activations != CheckpointActivations::kPiece,
                 "{}: expected {} or auto, received {}", named("checkpoint-activations", "piece"),
                 named("strategy", "partition"), to_string(options.strategy));
  ESPALIER_CHECK(!options.offload_context || options.checkpoint_activations == CheckpointActivations::kPiece,
                 "{}: expected {} (otherwise activations contain the context anyway), received {}",
                 named("offload-context"), named("checkpoint-activations", "piece"),
                 to_string(options.checkpoint_activations));
  if (!cuts && options.token_budget > 0) check_token_budget(forest, options.token_budget);
}

[[noreturn]] void throw_nothing_fits(const PlanOptions& options, const PlanCosts& costs, double least_bytes) {
  throw InputError(fmt::format(
      "memory budget: {} is too little; the smallest plan found needs {} ({:.0f} bytes), of which weights, "
      "gradients and optimiser take {}{}",
      human_bytes(static_cast<double>(options.memory_budget)), human_bytes(least_bytes), least_bytes,
      human_bytes(resident_bytes(costs.memory)),
      options.checkpoint_activations == CheckpointActivations::kNone
          ? fmt::format("; {} or piece needs less", named("checkpoint-activations", "layer"))
          : ""));
}

void check_no_memory_budget(const PlanOptions& options) {
  ESPALIER_CHECK(options.memory_budget == 0,
                 "memory budget: the memory of a plan depends on the model; expected {}", named("model"));
}

}  // namespace

PlanPrice price(const PlanCosts& costs, const Plan& plan) {
  MemoryModel memory = costs.memory;
  memory.checkpoint_activations = plan.options.checkpoint_activations;
  const std::vector<Load> loads = loads_of(plan.micro_batches, costs.time.cost.sliding_windows());
  double seconds = 0;
  for (const Load& load : loads) {
    seconds += predicted_seconds(costs.time, load, memory.checkpoint_activations);
  }
  return {seconds, plan_peak_bytes(memory, loads)};
}

Plan make_plan(const Forest& forest, const PlanOptions& options, const PlanCosts& costs) {
  check_options(forest, options);
  BestChoice choice;
  std::optional<Plan> best;
  for (const PlanOptions& way : ways_of(options)) {
    Candidate candidate = candidate_of(forest, way, costs, choice.seconds);
    if (choice.prefers(candidate)) best = std::move(candidate.plan);
  }
  if (!best) throw_nothing_fits(options, costs, choice.least_bytes);
  return *std::move(best);
}

Plan make_plan(const Forest& forest, const PlanOptions& options) {
  check_no_memory_budget(options);
  return make_plan(forest, options, common_costs());
}

PlanComparison compare_plans(const Forest& forest, const PlanOptions& options, const PlanCosts& costs,
                             const PlanProgress& progress) {
  check_options(forest, options);
  PlanOptions all = options;
  all.strategy = Strategy::kAuto;
  std::vector<PlanOptions> ways = ways_of(all);
  if (options.strategy == Strategy::kAppendOnly)
    std::ranges::copy(ways_of(options), std::back_inserter(ways));
  PlanComparison comparison;
  BestChoice choice;
  for (size_t i = 0; i < ways.size(); ++i) {
    const auto searching = [&](double fraction) {
      if (progress) progress(ways[i], (static_cast<double>(i) + fraction) / static_cast<double>(ways.size()));
    };
    const Candidate& candidate =
        comparison.candidates.emplace_back(candidate_of(forest, ways[i], costs, std::nullopt, searching));
    const bool open = options.strategy == Strategy::kAuto || options.strategy == ways[i].strategy;
    if (open && choice.prefers(candidate)) comparison.chosen = i;
  }
  if (!choice.seconds) throw_nothing_fits(options, costs, choice.least_bytes);
  return comparison;
}

PlanComparison compare_plans(const Forest& forest, const PlanOptions& options, const PlanProgress& progress) {
  check_no_memory_budget(options);
  return compare_plans(forest, options, common_costs(), progress);
}

PlanCosts common_costs() {
  const LayerSpec layer{AttentionSpec{.num_attention_heads = 16, .num_key_value_heads = 8, .head_dim = 128},
                        DenseMlpSpec{.intermediate_size = 3072}};
  const ModelCost common =
      model_cost({.hidden_size = 1024, .vocab_size = 151'936, .layers = std::vector<LayerSpec>(28, layer)});
  return {assumed_time_model(common), {.cost = common}};
}

}  // namespace espalier
