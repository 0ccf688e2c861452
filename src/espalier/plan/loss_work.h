// SPDX-License-Identifier: Apache-2.0
// The loads of micro-batches; the work of a plan if only some tokens carry loss, and of the same loss without
// trees.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/plan/context.h"
#include "espalier/plan/cost_model.h"
#include "espalier/plan/plan.h"

namespace espalier {

/// The loads of a plan's micro-batches, as if every token carried loss: every token is a logit row, with one
/// term for every trajectory that it belongs to. `windows`: ModelCost::sliding_windows.
std::vector<Load> loads_of(std::span<const MicroBatch> micro_batches, std::span<const int64_t> windows = {});

/// Visible pairs within a sliding window of `size` consecutive queries on a root path, the first of them at
/// `position`.
int64_t pairs_in_window(int64_t position, int64_t size, int64_t window);

/// By micro-batch and window: the visible pairs, keys in context included.
std::vector<std::vector<int64_t>> window_pairs(const ContextIndex& index, std::span<const int64_t> windows);

/// Sets the cuts of all loads, counting only micro-batches that run (`runs`, by micro-batch).
void count_cuts(std::span<const MicroBatch> micro_batches, const std::vector<bool>& runs,
                std::vector<Load>* loads);

/// The tokens with loss: row k has their positions in trajectory k, ascending and at least 1, because nothing
/// predicts a first token.
using LossPositions = Csr<int64_t>;

/// Every token of every trajectory but the first.
LossPositions all_loss_positions(const Forest& forest);

/// The tokens of a placement's trajectory that its micro-batch predicts, as positions [begin, end): those
/// whose preceding token lies in it.
struct PositionRange {
  int64_t begin, end;
};
PositionRange predicted_positions(const Forest& forest, const MicroBatch& micro_batch,
                                  const Placement& placement);

/// For each micro-batch, whether it or a descendant predicts a token with loss. Others need not run.
/// `last_position` [num_trajectories]: position of the last token with loss, 0: none.
std::vector<bool> micro_batches_with_loss(const Forest& forest, const Plan& plan,
                                          std::span<const int64_t> last_position);

/// The loads of a plan's micro-batches, with the rows and terms that actually reach the LM head. Empty loads
/// for micro-batches that need not run. `windows`: ModelCost::sliding_windows.
std::vector<Load> loads_with_loss(const Forest& forest, const Plan& plan, const LossPositions& loss,
                                  std::span<const int64_t> windows = {});

/// Work of a plan (the sum of its loads_with_loss); of the same trajectories with nothing shared; and after
/// append-only merging (see ForestStatistics), where the loss of a dropped trajectory is computed in one that
/// extends it. Logit rows are counted per micro-batch (plan) and per sequence (flat, append-only).
Work work_of(std::span<const Load> loads, std::span<const int64_t> windows = {});
Work flat_work(const Forest& forest, const LossPositions& loss, std::span<const int64_t> windows = {});
Work append_only_work(const Forest& forest, const LossPositions& loss, std::span<const int64_t> windows = {});

/// FLOPs of forward and backward (step_flops): of a plan, without recomputation of activations, and of the
/// same loss without trees.
struct LossFlops {
  double plan = 0, sequence_packing = 0, append_only = 0;

  LossFlops& operator+=(const LossFlops& other);
};
LossFlops loss_flops(const ModelCost& model, const Forest& forest, const Plan& plan,
                     const LossPositions& loss);

}  // namespace espalier
