// SPDX-License-Identifier: Apache-2.0
// Ways of running the same step against each other: same engine, same data, interleaved in one run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/engine/cost.h"
#include "espalier/measure/profile.h"
#include "espalier/model/decoder.h"

namespace espalier {

struct BenchmarkOptions {
  int64_t repeats = 5;       // measured rounds: every side once, in an order that changes from round to round
  int64_t warmup = 1;        // steps of the first side before them, not counted
  bool cpu_seconds = false;  // CPU seconds of the process instead of wall seconds: steadier on a busy machine
  ObjectiveOptions objective;
  Profiler* profiler = nullptr;  // of one more round of the first side, after those that are measured
};

/// One way of running the step.
struct BenchmarkSide {
  std::string name;
  PlanOptions plan;
  bool merged = false;  // the step after append-only merging (merge_append_only), always with sft
};

/// Trees, cut by `strategy` where they are larger than the token budget (0: as many tokens as the forest
/// has).
BenchmarkSide tree_side(const Forest& forest, Strategy strategy, int64_t token_budget);

/// tree_side against sequence packing at the same token budget, so that both sides' micro-batches are alike.
/// Between them stands sequence packing after append-only merging, where there is anything to merge.
std::vector<BenchmarkSide> tree_and_packing_sides(const Forest& forest, Strategy strategy,
                                                  int64_t token_budget);

/// The whole forest in one micro-batch; then partition, tree packing and, last, sequence packing at a token
/// budget of `budget_fraction` of the tree tokens, rounded up. The packing strategies cannot run below the
/// longest trajectory: where it is longer, it is their budget. Throws InputError for a fraction outside (0,
/// 1].
std::vector<BenchmarkSide> strategy_sides(const Forest& forest, double budget_fraction);

/// What a side took. Seconds are those of one forward and backward pass over all trajectories; ratios are
/// medians of the ratios of each round.
struct SideResult {
  BenchmarkSide side;
  int64_t micro_batches = 0;
  int64_t encoded_tokens = 0;
  double err = 0;      // effective reuse ratio: 1 - encoded / flat
  double seconds = 0;  // median
  double speedup = 0;  // seconds of the last side / seconds
  double speedup_low = 0;
  double speedup_high = 0;
  double relative_speed = 0;  // seconds of the first side / seconds
  double bound = 0;           // FLOPs(flat) / FLOPs(this side's plan)
  double share_of_bound = 0;  // speedup / bound
  // Over append-only merging: seconds of the merged side / seconds; speedup where there is no such side.
  double merging_speedup = 0;
  double merging_bound = 0;  // FLOPs after append-only merging / FLOPs(this side's plan)
  double tflops_per_second = 0;
  double loss = 0;         // of the last round, as is grad_norm
  double grad_norm = 0;    // of all gradients together
  int64_t peak_bytes = 0;  // of tensors on the decoder's device, weights and gradient sums included; 0 where
                           // nothing counts them
  int64_t working_bytes = 0;  // peak_bytes without weights and gradient sums; 0 likewise
};

struct BenchmarkResult {
  int64_t flat_tokens = 0;
  int64_t tree_tokens = 0;
  double cached_token_ratio = 0;   // flat / tree
  double por = 0;                  // 1 - tree / flat
  int64_t append_only_tokens = 0;  // after append-only merging
  int64_t longest_trajectory = 0;
  std::vector<SideResult> sides;  // as asked for

  const SideResult* merged_side() const;  // null where there is none
};

using BenchmarkProgress = std::function<void(const std::string& text)>;

/// Measures all trajectories as one step, under each of the sides; the last one is the baseline. Planning is
/// not measured.
BenchmarkResult benchmark(const Decoder& decoder, const Trajectories& trajectories,
                          const std::vector<BenchmarkSide>& sides, const BenchmarkOptions& options,
                          const BenchmarkProgress& progress = {});

}  // namespace espalier
