// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/loss_work.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "espalier/base/interrupt.h"

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

namespace {

struct TermCounts {
  int64_t logit_rows = 0;
  int64_t terms = 0;
};

// Counts the tokens with loss that the micro-batch predicts.
TermCounts count_terms(const Forest& forest, const MicroBatch& micro_batch, const LossPositions& loss) {
  const Layout layout = make_micro_batch_layout(forest, micro_batch);
  std::vector<bool> predicts(layout.num_tokens());
  TermCounts counts;
  for (const Placement& placement : micro_batch.trajectories) {
    const PositionRange range = predicted_positions(forest, micro_batch, placement);
    const auto positions = loss.row(placement.trajectory);
    const auto begin = std::ranges::lower_bound(positions, range.begin);
    const auto end = std::lower_bound(begin, positions.end(), range.end);
    if (begin == end) continue;
    const std::vector<int64_t> path = path_tokens(layout, placement.run);
    const int64_t first = layout.position_ids[path.front()];
    for (auto position = begin; position != end; ++position) predicts[path[*position - 1 - first]] = true;
    counts.terms += end - begin;
  }
  counts.logit_rows = std::count(predicts.begin(), predicts.end(), true);
  return counts;
}

// For each run of a micro-batch, the position of the first token of its path inside the micro-batch.
std::vector<int64_t> first_positions(const Forest& forest, const MicroBatch& micro_batch) {
  const std::vector<Run>& runs = micro_batch.runs;
  std::vector<int64_t> first(runs.size());
  for (size_t k = 0; k < runs.size(); ++k) {
    first[k] = runs[k].parent < 0 ? token_position(forest, runs[k].begin) : first[runs[k].parent];
  }
  return first;
}

std::vector<int64_t> last_positions(const LossPositions& loss) {
  std::vector<int64_t> last(loss.num_rows());
  for (int64_t k = 0; k < loss.num_rows(); ++k) last[k] = loss.row_size(k) == 0 ? 0 : loss.row(k).back();
  return last;
}

// The work of a separate sequence.
Work sequence_work(int64_t size, int64_t logit_rows, std::span<const int64_t> windows) {
  Work work{size, size * (size + 1) / 2, logit_rows};
  for (const int64_t window : windows) work.window_pairs.push_back(pairs_in_window(0, size, window));
  return work;
}

}  // namespace

LossPositions all_loss_positions(const Forest& forest) {
  LossPositions loss;
  for (int64_t k = 0; k < forest.num_trajectories(); ++k) {
    for (int64_t position = 1; position < forest.trajectory_size(k); ++position) {
      loss.values.push_back(position);
    }
    loss.end_row();
  }
  return loss;
}

PositionRange predicted_positions(const Forest& forest, const MicroBatch& micro_batch,
                                  const Placement& placement) {
  int64_t root = placement.run;
  while (micro_batch.runs[root].parent >= 0) root = micro_batch.runs[root].parent;
  return {token_position(forest, micro_batch.runs[root].begin) + 1,
          token_position(forest, micro_batch.runs[placement.run].end - 1) + 2};
}

std::vector<bool> micro_batches_with_loss(const Forest& forest, const Plan& plan,
                                          std::span<const int64_t> last_position) {
  const std::vector<MicroBatch>& micro_batches = plan.micro_batches;
  std::vector<bool> result(micro_batches.size());
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    const std::vector<int64_t> first = first_positions(forest, micro_batches[m]);
    for (const Placement& placement : micro_batches[m].trajectories) {
      // A later token is predicted here or below.
      if (last_position[placement.trajectory] > first[placement.run]) result[m] = true;
    }
  }
  return result;
}

std::vector<Load> loads_with_loss(const Forest& forest, const Plan& plan, const LossPositions& loss,
                                  std::span<const int64_t> windows) {
  std::vector<Load> loads = loads_of(plan.micro_batches, windows);
  const std::vector<bool> with_loss = micro_batches_with_loss(forest, plan, last_positions(loss));
  for (size_t m = 0; m < loads.size(); ++m) {
    check_interrupt();
    if (!with_loss[m]) {
      const int64_t parent = loads[m].parent;
      loads[m] = {};
      loads[m].parent = parent;
      loads[m].window_pairs.resize(windows.size());
      continue;
    }
    const TermCounts counts = count_terms(forest, plan.micro_batches[m], loss);
    loads[m].logit_rows = counts.logit_rows;
    loads[m].terms = counts.terms;
  }
  count_cuts(plan.micro_batches, with_loss, &loads);
  return loads;
}

Work work_of(std::span<const Load> loads, std::span<const int64_t> windows) {
  Work total{.window_pairs = std::vector<int64_t>(windows.size())};
  for (const Load& load : loads) total += {load.tokens, load.pairs, load.logit_rows, load.window_pairs};
  return total;
}

Work flat_work(const Forest& forest, const LossPositions& loss, std::span<const int64_t> windows) {
  Work work{.window_pairs = std::vector<int64_t>(windows.size())};
  for (int64_t k = 0; k < forest.num_trajectories(); ++k) {
    work += sequence_work(forest.trajectory_size(k), loss.row_size(k), windows);
  }
  return work;
}

Work append_only_work(const Forest& forest, const LossPositions& loss, std::span<const int64_t> windows) {
  const std::vector<int64_t> first_leaf = first_leaves(forest);
  std::map<int64_t, std::set<int64_t>> targets_of_leaf;
  for (int64_t k = 0; k < forest.num_trajectories(); ++k) {
    check_interrupt();
    const auto positions = loss.row(k);
    targets_of_leaf[first_leaf[forest.end_node[k]]].insert(positions.begin(), positions.end());
  }
  Work work{.window_pairs = std::vector<int64_t>(windows.size())};
  for (const auto& [leaf, targets] : targets_of_leaf) {
    const int64_t size = forest.position[leaf] + forest.node_size(leaf);
    work += sequence_work(size, static_cast<int64_t>(targets.size()), windows);
  }
  return work;
}

LossFlops& LossFlops::operator+=(const LossFlops& other) {
  plan += other.plan;
  sequence_packing += other.sequence_packing;
  append_only += other.append_only;
  return *this;
}

LossFlops loss_flops(const ModelCost& model, const Forest& forest, const Plan& plan,
                     const LossPositions& loss) {
  const std::vector<int64_t> windows = model.sliding_windows();
  const std::vector<Load> loads = loads_with_loss(forest, plan, loss, windows);
  return {.plan = step_flops(model, work_of(loads, windows)).total(),
          .sequence_packing = step_flops(model, flat_work(forest, loss, windows)).total(),
          .append_only = step_flops(model, append_only_work(forest, loss, windows)).total()};
}

}  // namespace espalier
