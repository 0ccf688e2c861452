// SPDX-License-Identifier: Apache-2.0
// Speed of forest building. Run: core_bench --benchmark_filter=Forest
#include <benchmark/benchmark.h>

#include "espalier/base/csr.h"
#include "espalier/base/rng.h"
#include "espalier/tree/forest.h"
#include "espalier/tree/synth.h"

namespace espalier {
namespace {

void build(benchmark::State& state, const Csr<int32_t>& rows) {
  const TokenSequences sequences{.offsets = rows.offsets, .tokens = rows.values};
  Forest forest;
  for (auto _ : state) {
    forest = build_forest(sequences);
    benchmark::DoNotOptimize(forest.tokens.data());
  }
  const auto tokens = static_cast<double>(rows.values.size());
  state.counters["flat_tokens"] = tokens;
  state.counters["tree_tokens"] = static_cast<double>(forest.tree_tokens());
  state.counters["nodes"] = static_cast<double>(forest.num_nodes());
  state.counters["flat_tokens/s"] = benchmark::Counter(tokens, benchmark::Counter::kIsIterationInvariantRate);
}

/// Argument: flat tokens in millions. Trees of 8 x 8 x 8 leaves, three shared nodes of 8192 tokens above
/// each.
void BM_ForestLongSharedPrefixes(benchmark::State& state) {
  constexpr int64_t kTokensPerTree = 512 * 4 * 8192;
  const int64_t num_trees = (state.range(0) * 1'000'000 + kTokensPerTree - 1) / kTokensPerTree;
  build(
      state,
      synthesize(
          {.num_trees = num_trees, .depth = 4, .branching = 8, .node_length = 8192, .vocab_size = 150'000}));
}
BENCHMARK(BM_ForestLongSharedPrefixes)->Arg(10)->Arg(100)->Unit(benchmark::kMillisecond);

/// Argument: rows, of 1 to 16 tokens among 64 ids.
void BM_ForestShortRows(benchmark::State& state) {
  Rng rng(1);
  Csr<int32_t> rows;
  for (int64_t r = 0; r < state.range(0); ++r) {
    const int64_t size = rng.between(1, 16);
    for (int64_t t = 0; t < size; ++t) rows.values.push_back(static_cast<int32_t>(rng.below(64)));
    rows.end_row();
  }
  build(state, rows);
}
BENCHMARK(BM_ForestShortRows)->Arg(10'000)->Arg(1'000'000)->Unit(benchmark::kMillisecond);

/// Argument: depth of a chain of one-token nodes, each of which ends a trajectory: the most nodes per token.
void BM_ForestDeepChain(benchmark::State& state) {
  Csr<int32_t> rows;
  for (int64_t size = 1; size <= state.range(0); ++size) {
    rows.values.insert(rows.values.end(), size, 7);
    rows.end_row();
  }
  build(state, rows);
}
BENCHMARK(BM_ForestDeepChain)->Arg(4'000)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace espalier
