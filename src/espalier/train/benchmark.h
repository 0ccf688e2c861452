// Tree training against sequence packing: same engine, same data, interleaved in one run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/train/cost.h"

namespace espalier {

struct BenchmarkOptions {
  int64_t token_budget =
      0;                // 0: as many as the forest has tokens, so that both sides' micro-batches are alike
  int64_t repeats = 5;  // measured rounds, each tree then packing (and the other way round every second time)
  int64_t warmup = 1;   // tree steps before, not counted
  ObjectiveOptions objective;
};

struct BenchmarkRow {
  int64_t flat_tokens = 0;
  int64_t tree_tokens = 0;
  double cached_token_ratio = 0;  // flat / tree
  double tree_seconds = 0;        // medians of one forward and backward over all trajectories
  double packing_seconds = 0;
  double speedup = 0;      // median of the per-round ratios packing / tree
  double speedup_low = 0;  // smallest and largest of them
  double speedup_high = 0;
  double bound = 0;           // FLOPs(flat) / FLOPs(tree)
  double share_of_bound = 0;  // speedup / bound
  double tree_tflops_per_second = 0;
  double packing_tflops_per_second = 0;
};

using BenchmarkProgress = std::function<void(const std::string& text)>;

/// Measures all trajectories as one step. The packing side runs under Strategy::kSequencePacking with the
/// same token budget, and at ratio 1 both sides do the same work.
BenchmarkRow benchmark(const Decoder& decoder, const Trajectories& trajectories,
                       const BenchmarkOptions& options, const BenchmarkProgress& progress = {});

}  // namespace espalier
