// SPDX-License-Identifier: Apache-2.0
// The tensors of a micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "espalier/config/layer_spec.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/recorded_routes.h"
#include "espalier/engine/step.h"
#include "espalier/model/node_structure.h"
#include "espalier/model/row_adapters.h"
#include "espalier/objective/loss.h"

namespace espalier {

class BatchPart;  // part.h

/// One micro-batch: T tokens, R rows that reach the LM head, E edges, M terms. An edge belongs to the
/// micro-batch of its source: the last token before a cut predicts the first one after it. Tensors are on the
/// host until to_device.
struct Batch {
  at::Tensor input_ids;         // [T] int64
  at::Tensor position_ids;      // [T] int64
  at::Tensor subtree_end;       // [T] int32
  at::Tensor logit_rows;        // [R] int64, ascending: tokens that predict at least one edge
  at::Tensor edge_row;          // [E] int64, ascending, into logit_rows
  at::Tensor edge_target;       // [E] int64
  at::Tensor edge_temperature;  // [E] float64, see Edges; undefined if all are 1
  at::Tensor term_edge;         // [M] int64: the edge that a term reads
  at::Tensor topk_edge;         // [M, K] int64: edges to the reference's most likely tokens at the term's
                                // position; undefined unless the loss reads_topk(), or without terms
  std::vector<at::Tensor> part_terms;  // by part of a mix: its terms [M'] int64; empty without a mix
  TermTensors terms;
  std::vector<int64_t> term_index;  // [M] index in Step::terms.values
  std::vector<int64_t> term_token;  // [M] flat index of the term's token in the data: offsets[row] + position
  std::vector<int64_t> edge_token;  // [E] token of this batch that the edge predicts; -1: in a child, or none
                                    // (topk_edge, Trajectories::target_ids)
  std::vector<int64_t> ancestors;   // micro-batches whose context this one reads, root first
  at::Tensor context_blocks;        // [P, 5] int64, see AttentionContext; segments index `ancestors`;
                                    // always on the host
  at::Tensor context_positions;     // [P] int64, see AttentionContext; always on the host
  std::shared_ptr<const NodeStructure> nodes;  // the runs of the micro-batch, on the host
  at::Tensor routes, multiplicity;             // see RouterContext; undefined unless set by set_router_inputs
  std::shared_ptr<const accumulating::RowAdapters> adapters;  // null unless the step has them
  std::shared_ptr<const BatchPart> part;                      // null unless ranks divide the micro-batch

  int64_t num_tokens() const { return input_ids.size(0); }
  int64_t num_logit_rows() const { return logit_rows.size(0); }
  int64_t num_terms() const { return term_edge.size(0); }
};

/// A column of the term Step::terms.values[index] of trajectory k of the step. The advantage of a term shared
/// by several trajectories (Step::sharers) is their mean.
double term_column(const Step& step, const Loss& loss, TermColumn column, int64_t k, int64_t index);

/// The batch of micro-batch `index` of step.plan, this rank's part of it where ranks divide it. A part has a
/// row that reaches the LM head wherever the micro-batch has one, so that all ranks run the head.
Batch make_batch(const Step& step, int64_t index, const Loss& loss);

/// Moves the tensors to the device, except context_blocks and context_positions, in one asynchronous copy
/// (upload in runtime/device.h).
Batch to_device(Batch batch, at::Device device);

/// Sets batch->multiplicity: for each token of micro-batch `index`, the number of trajectories placed there
/// that pass it. A token in several micro-batches counts in each for those placed there, so that the sum over
/// the step is its number of flat tokens. Sets batch->routes if the data record them. Tensors are on the
/// host.
void set_router_inputs(const Step& step, int64_t index, const Trajectories& trajectories,
                       const RouterShape& routers, Batch* batch);

}  // namespace espalier
