// SPDX-License-Identifier: Apache-2.0
// Benchmark of several ways to run the same step, with the same engine and data, interleaved.
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
  int64_t repeats = 5;       // measured rounds; each runs every side once, in varying order
  int64_t warmup = 1;        // unmeasured steps of the first side before them
  bool cpu_seconds = false;  // measure CPU seconds of the process instead of wall seconds
  ObjectiveOptions objective;
  Profiler* profiler = nullptr;  // profiles an additional step of the first side at the end
};

/// One way of running the step.
struct BenchmarkSide {
  std::string name;
  PlanOptions plan;
};

/// Trees, cut by `strategy` if larger than the token budget (0: the tokens of the forest).
BenchmarkSide tree_side(const Forest& forest, Strategy strategy, int64_t token_budget);

/// tree_side and, last, sequence packing at the same token budget, so that micro-batches have equal sizes.
/// Sequence packing after append-only merging is added between them if there is anything to merge.
std::vector<BenchmarkSide> tree_and_packing_sides(const Forest& forest, Strategy strategy,
                                                  int64_t token_budget);

/// The whole forest in one micro-batch; then partition, tree packing and, last, sequence packing at a token
/// budget of `budget_fraction` of the tree tokens, rounded up. Packing needs a budget of at least the longest
/// trajectory, and uses that if it is larger. Throws InputError for a fraction outside (0, 1].
std::vector<BenchmarkSide> strategy_sides(const Forest& forest, double budget_fraction);

/// What was measured of a side, in rounds of one forward and backward pass over all trajectories.
struct SideResult {
  BenchmarkSide side;
  std::vector<double> seconds{};  // by round
  int64_t micro_batches = 0, encoded_tokens = 0;
  double flops = 0;           // that ran
  double plan_flops = 0;      // of the plan, without tokens that no loss reaches
  double loss = 0;            // of the last round, as is grad_norm
  double grad_norm = 0;       // over all gradients
  int64_t peak_bytes = 0;     // of tensors on the decoder's device, including weights and gradient sums; 0
                              // if not available
  int64_t working_bytes = 0;  // peak_bytes without weights and gradient sums
};

struct BenchmarkResult {
  int64_t flat_tokens = 0, tree_tokens = 0;
  int64_t append_only_tokens = 0;                   // after append-only merging
  double packing_flops = 0, append_only_flops = 0;  // as plan_flops
  std::vector<SideResult> sides;                    // in the requested order
};

using BenchmarkProgress = std::function<void(const std::string& text)>;

/// Measures one step over all trajectories for each side; the last side is the baseline. Planning is not
/// measured.
BenchmarkResult benchmark(const Decoder& decoder, const Trajectories& trajectories,
                          const std::vector<BenchmarkSide>& sides, const BenchmarkOptions& options,
                          const BenchmarkProgress& progress = {});

}  // namespace espalier
