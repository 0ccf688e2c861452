// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/benchmark.h"

#include <algorithm>
#include <cmath>
#include <ctime>

#include "espalier/base/check.h"
#include "espalier/engine/engine.h"
#include "espalier/model/model.h"
#include "espalier/runtime/device.h"
#include "espalier/tree/forest.h"

namespace espalier {
namespace {

double now(bool cpu_seconds) {
  timespec time{};
  clock_gettime(cpu_seconds ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A side and its last step; counts are equal in all rounds.
struct MeasuredSide {
  Step step;
  StepResult result{};
  SideResult found{};
};

class Rounds {
 public:
  Rounds(const Decoder& decoder, const Loss& loss, const BenchmarkOptions& options)
      : decoder_(decoder), loss_(loss), options_(options) {}

  StepResult run_step(const MeasuredSide& measured) const {
    return forward_backward(decoder_, measured.step, loss_);
  }

  void run(MeasuredSide* measured) const {
    decoder_.zero_gradients();
    synchronize(decoder_.device());
    const double begin = now(options_.cpu_seconds);
    measured->result = run_step(*measured);
    synchronize(decoder_.device());
    measured->found.seconds.push_back(now(options_.cpu_seconds) - begin);
    measured->found.grad_norm = global_norm(decoder_.gradients());
    for (const MicroBatchMeasure& measure : measured->result.measured) {
      measured->found.peak_bytes = std::max(measured->found.peak_bytes, measure.peak_bytes);
    }
  }

 private:
  const Decoder& decoder_;
  const Loss& loss_;
  const BenchmarkOptions& options_;
};

// Bytes of weights and gradient sums, which every step holds.
int64_t resident_bytes(const Decoder& decoder) {
  int64_t bytes = 0;
  for (const Parameter& parameter : decoder.parameters()) {
    const auto element = static_cast<int64_t>(parameter.value.element_size());
    bytes += parameter.value.numel() * (element + std::max<int64_t>(element, 4));
  }
  return bytes;
}

SideResult summarize(const Decoder& decoder, const MeasuredSide& measured, const BenchmarkSide& kind) {
  const ModelCost model = model_cost(decoder.config());
  SideResult side = measured.found;
  side.side = kind;
  side.micro_batches = static_cast<int64_t>(measured.result.measured.size());
  side.encoded_tokens = measured.result.work.tokens;
  side.flops = step_flops(model, measured.result.work).total();
  side.plan_flops = loss_flops(model, measured.step).plan;
  side.loss = measured.result.loss;
  side.working_bytes = std::max<int64_t>(0, side.peak_bytes - resident_bytes(decoder));
  return side;
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
  return {tree,
          {"append-only merging", {Strategy::kAppendOnly, packing.token_budget}},
          {"sequence packing", packing}};
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

BenchmarkResult benchmark(const Decoder& decoder, const Trajectories& trajectories,
                          const std::vector<BenchmarkSide>& sides, const BenchmarkOptions& options,
                          const BenchmarkProgress& progress) {
  ESPALIER_ASSERT(!sides.empty() && options.repeats > 0);
  const Forest forest = forest_of(trajectories, {});
  const Loss loss(trajectories, options.objective);
  std::vector<MeasuredSide> measured(sides.size());
  for (size_t s = 0; s < sides.size(); ++s) {
    measured[s].step = make_step(trajectories, {.plan = sides[s].plan, .objective = options.objective});
  }
  Rounds rounds(decoder, loss, options);
  for (int64_t i = 0; i < options.warmup; ++i) rounds.run(&measured.front());
  measured.front().found.seconds.clear();
  for (int64_t round = 0; round < options.repeats; ++round) {
    // Rotate the order and alternate its direction, so that drift over time favours no side.
    std::string text;
    for (size_t i = 0; i < sides.size(); ++i) {
      const size_t k = round % 2 == 0 ? i : sides.size() - 1 - i;
      const size_t s = (k + static_cast<size_t>(round / 2)) % sides.size();
      rounds.run(&measured[s]);
      text +=
          fmt::format("{}{} {:.3f} s", i == 0 ? "" : ", ", sides[s].name, measured[s].found.seconds.back());
    }
    if (progress) progress(fmt::format("round {}: {}", round + 1, text));
  }

  if (options.profiler != nullptr) {
    decoder.zero_gradients();
    options.profiler->start();
    const StepResult result = rounds.run_step(measured.front());
    const std::string profile = options.profiler->stop(decoder, result);
    if (progress) progress(fmt::format("{}: {}", sides.front().name, profile));
  }

  const LossFlops flops = loss_flops(model_cost(decoder.config()), measured.front().step);
  BenchmarkResult result{.flat_tokens = forest.flat_tokens(),
                         .tree_tokens = forest.tree_tokens(),
                         .append_only_tokens = forest_statistics(forest).append_only_tokens,
                         .packing_flops = flops.sequence_packing,
                         .append_only_flops = flops.append_only,
                         .sides = {}};
  for (size_t s = 0; s < sides.size(); ++s) result.sides.push_back(summarize(decoder, measured[s], sides[s]));
  return result;
}

}  // namespace espalier
