// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/planner.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/plan/partition.h"
#include "espalier/plan/sequence_packing.h"
#include "espalier/plan/tree_packing.h"

namespace espalier {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

void check_token_budget(const Forest& forest, int64_t budget) {
  const int64_t smallest = longest_trajectory(forest);
  if (smallest <= budget) return;
  int64_t r = 0;
  while (forest.trajectory_size(r) <= budget) ++r;
  throw InputError(fmt::format(
      "trajectory {} has {} tokens, more than the token budget {}: expected a budget of at least {}, the "
      "longest trajectory, or --strategy partition, which cuts trajectories",
      r, forest.trajectory_size(r), budget, smallest));
}

// Keeps the cheapest of the plans added to it, and the first of those with equal prices. Prices are computed
// only when there are two plans to compare.
class Cheapest {
 public:
  explicit Cheapest(const PlanCosts& costs) : costs_(costs) {}

  void add(Plan plan, std::optional<PlanPrice> known = {}) {
    if (best_) {
      if (!price_) price_ = price(costs_, *best_);
      if (!known) known = price(costs_, plan);
      if (known->seconds >= price_->seconds) return;
    }
    best_ = std::move(plan);
    price_ = known;
  }
  bool empty() const { return !best_; }
  /// Whether some plan takes at most these seconds. All plans must have been added with a known price.
  bool beats(double seconds) const { return best_ && price_->seconds <= seconds; }
  Plan take() { return *std::move(best_); }

 private:
  const PlanCosts& costs_;
  std::optional<Plan> best_;
  std::optional<PlanPrice> price_;
};

// The strategy's plans under one token budget, at least one of them.
std::vector<Plan> plans_within(const Forest& forest, PlanOptions options, int64_t token_budget) {
  options.token_budget = token_budget == kNoLimit ? 0 : token_budget;
  std::vector<Plan> plans;
  switch (options.strategy) {
    case Strategy::kTreePacking:
      plans.push_back({options, pack_trees(forest, token_budget)});
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

// The smallest token budget worth trying. Packing needs room for the longest trajectory. Partition could go
// down to one token. But under any budget the weights are in memory, and so is the longest trajectory while
// its last micro-batch runs. Micro-batches that need less than a hundredth of that gain nothing by being
// smaller.
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
  const bool shares = options.strategy != Strategy::kSequencePacking;
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

// Adds the strategy's plans that fit the memory budget to `cheapest`. Lowers `least_bytes` to the least that
// any plan needs. Planning a large forest takes long, so few token budgets are tried: strides find one that
// fits, and bisection finds the largest between the last two strides. The strides do not depend on the memory
// budget, so a plan of `least_bytes` is found again when the memory budget is exactly that.
void add_within_memory(const Forest& forest, const PlanOptions& options, const PlanCosts& costs,
                       Cheapest* cheapest, double* least_bytes) {
  const std::vector<int64_t> budgets = token_budgets(forest, options, costs);
  std::vector<std::optional<bool>> known(budgets.size());
  double seconds = 0;  // of the fastest plan at the token budget tried last
  const auto try_at = [&](size_t i) {
    if (known[i]) return *known[i];
    known[i] = false;
    seconds = std::numeric_limits<double>::infinity();
    for (Plan& plan : plans_within(forest, options, budgets[i])) {
      const PlanPrice predicted = price(costs, plan);
      *least_bytes = std::min(*least_bytes, predicted.bytes);
      seconds = std::min(seconds, predicted.seconds);
      if (predicted.bytes > static_cast<double>(options.memory_budget)) continue;
      cheapest->add(std::move(plan), predicted);
      known[i] = true;
    }
    return *known[i];
  };
  constexpr size_t kStride = 8;
  const size_t last = budgets.size() - 1;
  size_t begin = 0, fit = 0;
  while (!try_at(fit)) {
    // Smaller micro-batches take longer, so a strategy that is already too slow is given up.
    if (fit == last || cheapest->beats(seconds)) return;
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
  // For the same reason it is enough to try a few budgets below the first that fits.
  constexpr size_t kStepsPastTheFirstFit = 3;
  for (size_t i = fit + 1; i <= std::min(fit + kStepsPastTheFirstFit, last); ++i) try_at(i);
}

std::vector<Strategy> strategies_of(const Forest& forest, const PlanOptions& options) {
  if (options.strategy != Strategy::kAuto) return {options.strategy};
  const bool packs = options.token_budget == 0 || options.token_budget >= longest_trajectory(forest);
  if (!packs) return {Strategy::kPartition};
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

// The ways of planning that the options leave open.
std::vector<PlanOptions> ways_of(const Forest& forest, const PlanOptions& options) {
  std::vector<PlanOptions> ways;
  for (const Strategy strategy : strategies_of(forest, options)) {
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
                 "checkpoint-activations piece: expected --strategy partition or auto, received {}",
                 to_string(options.strategy));
  ESPALIER_CHECK(!options.offload_context || options.checkpoint_activations == CheckpointActivations::kPiece,
                 "offload-context: expected checkpoint-activations piece (otherwise activations hold the "
                 "context anyway), received {}",
                 to_string(options.checkpoint_activations));
  if (!cuts && options.token_budget > 0) check_token_budget(forest, options.token_budget);
}

}  // namespace

PlanPrice price(const PlanCosts& costs, const Plan& plan) {
  MemoryModel memory = costs.memory;
  memory.checkpoint_activations = plan.options.checkpoint_activations;
  const std::vector<Load> loads = loads_of(plan.micro_batches);
  double seconds = 0;
  for (const Load& load : loads) {
    seconds += predicted_seconds(costs.time, load, memory.checkpoint_activations);
  }
  return {seconds, plan_peak_bytes(memory, loads)};
}

Plan make_plan(const Forest& forest, const PlanOptions& options, const PlanCosts& costs) {
  check_options(forest, options);
  Cheapest cheapest(costs);
  double least_bytes = std::numeric_limits<double>::infinity();
  for (const PlanOptions& way : ways_of(forest, options)) {
    if (options.memory_budget > 0) {
      add_within_memory(forest, way, costs, &cheapest, &least_bytes);
      continue;
    }
    const int64_t budget = options.token_budget > 0 ? options.token_budget : kNoLimit;
    for (Plan& plan : plans_within(forest, way, budget)) cheapest.add(std::move(plan));
  }
  if (cheapest.empty()) {
    throw InputError(fmt::format(
        "memory budget: {} are too few; the smallest plan found needs {} ({:.0f} bytes), of which "
        "weights, gradients and optimiser take {}{}",
        human_bytes(static_cast<double>(options.memory_budget)), human_bytes(least_bytes), least_bytes,
        human_bytes(resident_bytes(costs.memory)),
        options.checkpoint_activations == CheckpointActivations::kNone
            ? "; --checkpoint-activations layer or piece needs less"
            : ""));
  }
  return cheapest.take();
}

Plan make_plan(const Forest& forest, const PlanOptions& options) {
  ESPALIER_CHECK(options.memory_budget == 0,
                 "memory budget: what a plan needs depends on the model; give --model");
  // The proportions of a decoder of half a billion parameters.
  const LayerSpec layer{AttentionSpec{.num_attention_heads = 16, .num_key_value_heads = 8, .head_dim = 128},
                        DenseMlpSpec{.intermediate_size = 3072}};
  const ModelCost common =
      model_cost({.hidden_size = 1024, .vocab_size = 151'936, .layers = std::vector<LayerSpec>(28, layer)});
  return make_plan(forest, options, {assumed_time_model(common), {.cost = common}});
}

}  // namespace espalier
