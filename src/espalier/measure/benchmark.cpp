// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/benchmark.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <functional>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/base/median.h"
#include "espalier/engine/engine.h"
#include "espalier/measure/append_only.h"
#include "espalier/model/global_norm.h"
#include "espalier/runtime/device.h"
#include "espalier/tree/statistics.h"

namespace espalier {
namespace {

double now(bool cpu_seconds) {
  timespec time{};
  clock_gettime(cpu_seconds ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// seconds[round] of `over` divided by those of `side`.
std::vector<double> ratios(const std::vector<double>& over, const std::vector<double>& side) {
  std::vector<double> result(side.size());
  std::transform(over.begin(), over.end(), side.begin(), result.begin(), std::divides<>());
  return result;
}

// A side, and what its rounds gave.
struct Runs {
  std::optional<Loss> loss;
  Step step;
  std::vector<double> seconds;
  StepResult result;  // of the last round: counts are the same in all
  double grad_norm = 0;
  int64_t peak_bytes = 0;
};

class Rounds {
 public:
  Rounds(const Decoder& decoder, const BenchmarkOptions& options) : decoder_(decoder), options_(options) {}

  StepResult run_step(const Runs& runs) const { return forward_backward(decoder_, runs.step, *runs.loss); }

  void run(Runs* runs) const {
    decoder_.zero_gradients();
    synchronize(decoder_.device());
    const double begin = now(options_.cpu_seconds);
    runs->result = run_step(*runs);
    synchronize(decoder_.device());
    runs->seconds.push_back(now(options_.cpu_seconds) - begin);
    runs->grad_norm = global_norm(decoder_.gradients());
    for (const MicroBatchMeasure& measure : runs->result.measured) {
      runs->peak_bytes = std::max(runs->peak_bytes, measure.peak_bytes);
    }
  }

 private:
  const Decoder& decoder_;
  const BenchmarkOptions& options_;
};

// Weights and gradient sums: what every step holds, whatever its plan.
int64_t resident_bytes(const Decoder& decoder) {
  int64_t bytes = 0;
  for (const Parameter& parameter : decoder.parameters()) {
    const auto element = static_cast<int64_t>(parameter.value.element_size());
    bytes += parameter.value.numel() * (element + std::max<int64_t>(element, 4));
  }
  return bytes;
}

// What the sides are compared with.
struct Compared {
  const Runs& first;
  const Runs& last;
  const Runs* merged;  // null: none was run, for merging would change nothing
  int64_t flat_tokens;
  double flat_flops, merged_flops;
};

Compared compared(const Decoder& decoder, const std::vector<Runs>& runs,
                  const std::vector<BenchmarkSide>& sides, const Step& whole) {
  const ModelCost model = model_cost(decoder.config());
  const auto merged =
      std::find_if(sides.begin(), sides.end(), [](const BenchmarkSide& side) { return side.merged; });
  return {.first = runs.front(),
          .last = runs.back(),
          .merged = merged == sides.end() ? nullptr : &runs[merged - sides.begin()],
          .flat_tokens = whole.flat_tokens(),
          .flat_flops = step_flops(model, flat_work(whole, model.sliding_windows())).total(),
          .merged_flops = step_flops(model, append_only_work(whole, model.sliding_windows())).total()};
}

SideResult summarize(const Decoder& decoder, const Runs& runs, const Compared& with) {
  const ModelCost model = model_cost(decoder.config());
  const std::vector<double> speedups = ratios(with.last.seconds, runs.seconds);
  const double plan_flops = step_flops(model, plan_work(runs.step, model.sliding_windows())).total();
  SideResult side;
  side.micro_batches = static_cast<int64_t>(runs.result.measured.size());
  side.encoded_tokens = runs.result.work.tokens;
  side.err = 1 - static_cast<double>(side.encoded_tokens) / static_cast<double>(with.flat_tokens);
  side.seconds = median(runs.seconds);
  side.speedup = median(speedups);
  side.speedup_low = *std::min_element(speedups.begin(), speedups.end());
  side.speedup_high = *std::max_element(speedups.begin(), speedups.end());
  side.relative_speed = median(ratios(with.first.seconds, runs.seconds));
  side.bound = with.flat_flops / plan_flops;
  side.share_of_bound = side.speedup / side.bound;
  side.merging_speedup =
      with.merged == nullptr ? side.speedup : median(ratios(with.merged->seconds, runs.seconds));
  side.merging_bound = with.merged_flops / plan_flops;
  side.tflops_per_second = step_flops(model, runs.result.work).total() / side.seconds / 1e12;
  side.loss = runs.result.loss;
  side.grad_norm = runs.grad_norm;
  side.peak_bytes = runs.peak_bytes;
  side.working_bytes = std::max<int64_t>(0, runs.peak_bytes - resident_bytes(decoder));
  return side;
}

// The objective of the merged side: merged trajectories have loss weights only.
ObjectiveOptions merged_objective(ObjectiveOptions objective) {
  objective.kind = ObjectiveKind::kSft;
  return objective;
}

}  // namespace

BenchmarkSide tree_side(const Forest& forest, Strategy strategy, int64_t token_budget) {
  return {"tree", {strategy, token_budget > 0 ? token_budget : forest.tree_tokens()}};
}

std::vector<BenchmarkSide> tree_and_packing_sides(const Forest& forest, Strategy strategy,
                                                  int64_t token_budget) {
  const BenchmarkSide tree = tree_side(forest, strategy, token_budget);
  const PlanOptions packing{Strategy::kSequencePacking, tree.plan.token_budget};
  const ForestStatistics statistics = forest_statistics(forest);
  if (statistics.append_only_tokens == statistics.flat_tokens) return {tree, {"sequence packing", packing}};
  return {tree, {"append-only merging", packing, /*merged=*/true}, {"sequence packing", packing}};
}

std::vector<BenchmarkSide> strategy_sides(const Forest& forest, double budget_fraction) {
  ESPALIER_CHECK(budget_fraction > 0 && budget_fraction <= 1,
                 "budget fraction: expected a part of the tree tokens in (0, 1], received {}",
                 budget_fraction);
  const auto budget =
      static_cast<int64_t>(std::ceil(budget_fraction * static_cast<double>(forest.tree_tokens())));
  const int64_t packing_budget = std::max(budget, longest_trajectory(forest));
  return {{"whole tree", {Strategy::kTreePacking, forest.tree_tokens()}},
          {"partition", {Strategy::kPartition, budget}},
          {"tree packing", {Strategy::kTreePacking, packing_budget}},
          {"sequence packing", {Strategy::kSequencePacking, packing_budget}}};
}

const SideResult* BenchmarkResult::merged_side() const {
  const auto found =
      std::find_if(sides.begin(), sides.end(), [](const SideResult& result) { return result.side.merged; });
  return found == sides.end() ? nullptr : &*found;
}

BenchmarkResult benchmark(const Decoder& decoder, const Trajectories& trajectories,
                          const std::vector<BenchmarkSide>& sides, const BenchmarkOptions& options,
                          const BenchmarkProgress& progress) {
  ESPALIER_ASSERT(!sides.empty() && options.repeats > 0);
  const Forest forest = forest_of(trajectories, {});
  const bool any_merged =
      std::any_of(sides.begin(), sides.end(), [](const BenchmarkSide& side) { return side.merged; });
  const Trajectories merged = any_merged ? merge_append_only(trajectories, forest) : Trajectories();
  std::vector<Runs> runs(sides.size());
  for (size_t s = 0; s < sides.size(); ++s) {
    const bool is_merged = sides[s].merged;
    const Trajectories& source = is_merged ? merged : trajectories;
    const ObjectiveOptions objective = is_merged ? merged_objective(options.objective) : options.objective;
    runs[s].loss.emplace(source, objective);
    runs[s].step = make_step(source, {.plan = sides[s].plan, .objective = objective});
  }
  ESPALIER_ASSERT(!sides.front().merged);
  Rounds rounds(decoder, options);
  for (int64_t i = 0; i < options.warmup; ++i) rounds.run(&runs.front());
  runs.front().seconds.clear();
  for (int64_t round = 0; round < options.repeats; ++round) {
    // The first place goes round and the direction alternates, so that what drifts over the run favours no
    // side.
    std::string text;
    for (size_t i = 0; i < sides.size(); ++i) {
      const size_t k = round % 2 == 0 ? i : sides.size() - 1 - i;
      const size_t s = (k + static_cast<size_t>(round / 2)) % sides.size();
      rounds.run(&runs[s]);
      text += fmt::format("{}{} {:.3f} s", i == 0 ? "" : ", ", sides[s].name, runs[s].seconds.back());
    }
    if (progress) progress(fmt::format("round {}: {}", round + 1, text));
  }

  if (options.profiler != nullptr) {
    decoder.zero_gradients();
    options.profiler->start();
    const StepResult result = rounds.run_step(runs.front());
    const ProfileSummary profile = options.profiler->stop(decoder, result);
    if (progress) progress(fmt::format("{}: {}", sides.front().name, profile.text()));
  }

  BenchmarkResult result;
  result.flat_tokens = forest.flat_tokens();
  result.tree_tokens = forest.tree_tokens();
  result.cached_token_ratio =
      static_cast<double>(result.flat_tokens) / static_cast<double>(result.tree_tokens);
  result.por = 1 - 1 / result.cached_token_ratio;
  result.append_only_tokens = forest_statistics(forest).append_only_tokens;
  result.longest_trajectory = longest_trajectory(forest);
  const Compared with = compared(decoder, runs, sides, runs.front().step);
  for (size_t s = 0; s < sides.size(); ++s) {
    result.sides.push_back(summarize(decoder, runs[s], with));
    result.sides.back().side = sides[s];
  }
  return result;
}

}  // namespace espalier
