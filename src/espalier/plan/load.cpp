// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/load.h"

#include <algorithm>
#include <utility>

namespace espalier {

int64_t pairs_in_window(int64_t position, int64_t size, int64_t window) {
  // Queries before position window - 1 see all keys up to themselves.
  const int64_t rising = std::clamp<int64_t>(window - position, 0, size);
  return rising * position + rising * (rising + 1) / 2 + (size - rising) * window;
}

std::vector<std::vector<int64_t>> window_pairs(const ContextIndex& index, std::span<const int64_t> windows) {
  std::vector<std::vector<int64_t>> pairs(index.micro_batches.size(), std::vector<int64_t>(windows.size()));
  for (size_t m = 0; m < pairs.size() && !windows.empty(); ++m) {
    const std::vector<Run>& runs = index.micro_batches[m].runs;
    for (size_t k = 0; k < runs.size(); ++k) {
      const int64_t size = runs[k].end - runs[k].begin;
      const int64_t position = index.path_length.row(static_cast<int64_t>(m))[k] - size;
      for (size_t w = 0; w < windows.size(); ++w) pairs[m][w] += pairs_in_window(position, size, windows[w]);
    }
  }
  return pairs;
}

std::vector<Load> loads_of(std::span<const MicroBatch> micro_batches, std::span<const int64_t> windows) {
  const ContextIndex index(micro_batches);
  std::vector<std::vector<int64_t>> in_windows = window_pairs(index, windows);
  std::vector<Load> loads(micro_batches.size());
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    const MicroBatch& micro_batch = micro_batches[m];
    Load& load = loads[m];
    load.tokens = micro_batch.num_tokens;
    load.pairs = micro_batch.num_pairs;
    load.logit_rows = micro_batch.num_tokens;
    load.parent = micro_batch.parent;
    load.window_pairs = std::move(in_windows[m]);
    std::vector<bool> inner(micro_batch.runs.size());
    std::vector<int64_t> path(micro_batch.runs.size());  // tokens up to the run's end
    for (size_t k = 0; k < path.size(); ++k) {
      const Run& run = micro_batch.runs[k];
      path[k] = run.end - run.begin + (run.parent < 0 ? 0 : path[run.parent]);
      if (run.parent >= 0) inner[run.parent] = true;
    }
    for (const Placement& placement : micro_batch.trajectories) load.terms += path[placement.run];
    load.mask_blocks = static_cast<int64_t>(micro_batch.runs.size());
    for (const bool is_inner : inner) load.mask_blocks += is_inner;
    if (micro_batch.parent >= 0) {
      load.mask_blocks += static_cast<int64_t>(context_blocks(index, static_cast<int64_t>(m)).size());
    }
  }
  count_cuts(micro_batches, std::vector<bool>(loads.size(), true), &loads);
  return loads;
}

void count_cuts(std::span<const MicroBatch> micro_batches, const std::vector<bool>& runs,
                std::vector<Load>* loads) {
  std::vector<std::vector<bool>> is_cut(loads->size());  // by run of the micro-batch
  for (size_t m = 0; m < loads->size(); ++m) {
    (*loads)[m].cuts = 0;
    const int64_t parent = micro_batches[m].parent;
    if (!runs[m] || parent < 0) continue;
    is_cut[parent].resize(micro_batches[parent].runs.size());
    for (const int64_t run : micro_batches[m].context_runs) {
      (*loads)[parent].cuts += !is_cut[parent][run];
      is_cut[parent][run] = true;
    }
  }
}

}  // namespace espalier
