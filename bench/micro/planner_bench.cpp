// SPDX-License-Identifier: Apache-2.0
// Speed of planning. Run: core_bench --benchmark_filter=Plan
#include <benchmark/benchmark.h>

#include "espalier/base/csr.h"
#include "espalier/plan/planner.h"
#include "espalier/tree/forest.h"
#include "espalier/tree/synth.h"

namespace espalier {
namespace {

/// Trees of 121 nodes (depth 5, branching 3) with 128 tokens in a node; a budget that splits every tree.
void plan(benchmark::State& state, Strategy strategy) {
  const int64_t num_trees = (state.range(0) + 120) / 121;
  const Csr<int32_t> rows = synthesize({.num_trees = num_trees,
                                        .depth = 5,
                                        .branching = 3,
                                        .node_length = 128,
                                        .vocab_size = 150'000,
                                        .end_inside = 0.2});
  const Forest forest = build_forest(TokenSequences{.offsets = rows.offsets, .tokens = rows.values});
  const PlanOptions options{.strategy = strategy, .token_budget = 4096};
  size_t batches = 0;
  for (auto _ : state) batches = make_plan(forest, options).micro_batches.size();
  state.counters["nodes"] = static_cast<double>(forest.num_nodes());
  state.counters["micro_batches"] = static_cast<double>(batches);
}

/// One tree of 3^depth leaves, all of it over the budget: the planner's hardest case.
void BM_PlanOneTree(benchmark::State& state) {
  const Csr<int32_t> rows =
      synthesize({.depth = state.range(0) + 1, .branching = 3, .node_length = 8, .vocab_size = 150'000});
  const Forest forest = build_forest(TokenSequences{.offsets = rows.offsets, .tokens = rows.values});
  const PlanOptions options{.strategy = Strategy::kTreePacking, .token_budget = 512};
  int64_t tokens = 0;
  for (auto _ : state) tokens = make_plan(forest, options).num_tokens();
  state.counters["nodes"] = static_cast<double>(forest.num_nodes());
  state.counters["encoded/tree"] = static_cast<double>(tokens) / static_cast<double>(forest.tree_tokens());
}
BENCHMARK(BM_PlanOneTree)->Arg(6)->Arg(8)->Arg(10)->Arg(12)->Unit(benchmark::kMillisecond);

void BM_PlanTreePacking(benchmark::State& state) {
  plan(state, Strategy::kTreePacking);
}
void BM_PlanSequencePacking(benchmark::State& state) {
  plan(state, Strategy::kSequencePacking);
}
BENCHMARK(BM_PlanTreePacking)->Arg(1'000)->Arg(10'000)->Arg(100'000)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_PlanSequencePacking)->Arg(1'000)->Arg(10'000)->Arg(100'000)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace espalier
