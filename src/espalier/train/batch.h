// From a plan to tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/plan/context.h"
#include "espalier/plan/planner.h"
#include "espalier/train/objective.h"

namespace espalier {

/// What one optimiser step works on: the trajectories, their forest, how it is cut, and the loss terms.
struct Step {
  std::vector<int64_t> rows;  // trajectories, as rows of the data; everything below counts in positions here
  Forest forest;
  Plan plan;
  Csr<ContextPiece> context;  // row m: what micro-batch m reads of its ancestors
  Csr<Term> terms;

  int64_t flat_tokens() const { return forest.flat_tokens(); }
};

/// Builds forest and plan of `rows`; terms by step_terms. Recorded expert routes that differ are not shared.
/// Plans are compared by `costs`, where given (make_plan).
Step make_step(const Trajectories& trajectories, std::vector<int64_t> rows, const PlanOptions& plan_options,
               const ObjectiveOptions& objective, const PlanCosts* costs = nullptr);

/// Makes `plan` that of the step.
void set_plan(Step* step, Plan plan);

/// Forest of the given rows of the data (all when empty).
Forest forest_of(const Trajectories& trajectories, std::span<const int64_t> rows);

/// Tensors of one micro-batch: T tokens, R rows that reach the LM head, E edges, M terms. An edge belongs to
/// the micro-batch of its source: the last token before a cut predicts the first one after it. Tensors are on
/// the host as make_batch makes them, on the device that they were moved to by to_device.
struct Batch {
  at::Tensor input_ids;     // [T] int64
  at::Tensor position_ids;  // [T] int64
  at::Tensor subtree_end;   // [T] int32
  at::Tensor head_rows;     // [R] int64, ascending: tokens that predict at least one edge with loss
  at::Tensor edge_row;      // [E] int64, ascending, into head_rows
  at::Tensor edge_target;   // [E] int64
  at::Tensor term_edge;     // [M] int64: the edge that a term reads
  TermTensors terms;
  std::vector<int64_t> term_token;  // [M] flat index of the term's token in the data: offsets[row] + position
  std::vector<int64_t> edge_token;  // [E] token of this batch that the edge predicts, -1: it is in a child
  std::vector<int64_t> ancestors;   // the micro-batches above, root first: each has context for this one
  at::Tensor context_pieces;        // [P, 5] int64, as of AttentionContext; segments index `ancestors`;
                                    // always on the host

  int64_t num_tokens() const { return input_ids.size(0); }
  int64_t num_head_rows() const { return head_rows.size(0); }
  int64_t num_terms() const { return term_edge.size(0); }
};

/// The batch of micro-batch `index` of step.plan. `advantages` may be null unless the objective is grpo.
Batch make_batch(const Trajectories& trajectories, const Step& step, int64_t index,
                 const ObjectiveOptions& objective, const Advantages* advantages);

/// The batch with its tensors on the device, but for context_pieces: copied in one go, without waiting
/// (upload in ops/device.h).
Batch to_device(Batch batch, at::Device device);

/// Of each micro-batch of the plan: does it, or a descendant, have an edge that carries loss? Others need not
/// run.
std::vector<bool> micro_batches_with_loss(const Step& step);

}  // namespace espalier
