// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/sequence_packing.h"

#include <algorithm>

#include "espalier/plan/bin_packing.h"

namespace espalier {
namespace {

/// For each node the topmost node of the stretch of its root path whose forest tokens are contiguous.
std::vector<int64_t> stretch_tops(const Forest& forest) {
  std::vector<int64_t> top(forest.num_nodes());
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    top[n] = n > 0 && forest.parent[n] == n - 1 ? top[n - 1] : n;
  }
  return top;
}

/// Appends the trajectory's path as a chain of runs, one per stretch.
void append_chain(const Forest& forest, const std::vector<int64_t>& top, int64_t trajectory,
                  MicroBatch& batch) {
  const auto first = static_cast<int64_t>(batch.runs.size());
  for (int64_t n = forest.end_node[trajectory]; n >= 0; n = forest.parent[top[n]]) {
    batch.runs.push_back({forest.node_begin[top[n]], forest.node_begin[n + 1], -1});
  }
  std::reverse(batch.runs.begin() + first, batch.runs.end());
  const auto last = static_cast<int64_t>(batch.runs.size()) - 1;
  for (int64_t k = first + 1; k <= last; ++k) batch.runs[k].parent = k - 1;
  batch.trajectories.push_back({trajectory, last});
}

}  // namespace

std::vector<MicroBatch> pack_sequences(const Forest& forest, int64_t budget) {
  std::vector<int64_t> sizes;
  sizes.reserve(forest.num_trajectories());
  for (int64_t r = 0; r < forest.num_trajectories(); ++r) sizes.push_back(forest.trajectory_size(r));
  const std::vector<int64_t> top = stretch_tops(forest);
  std::vector<MicroBatch> batches;
  for (const auto& bin : best_fit_decreasing(sizes, budget)) {
    MicroBatch& batch = batches.emplace_back();
    for (const int64_t r : bin) append_chain(forest, top, r, batch);
    finish_micro_batch(forest, batch);
  }
  return batches;
}

}  // namespace espalier
