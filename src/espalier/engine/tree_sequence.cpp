// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/tree_sequence.h"

#include <ATen/ATen.h>

#include <utility>

#include "espalier/base/check.h"
#include "espalier/ops/attention/tree_attention.h"

namespace espalier {

TreeSequence::TreeSequence(const Batch& batch, std::span<ContextFrame* const> ancestors,
                           c10::intrusive_ptr<RouterStatistics> statistics, RouterRecord* record)
    : subtree_end_(batch.subtree_end),
      position_ids_(batch.position_ids),
      context_blocks_(batch.context_blocks),
      context_positions_(batch.context_positions),
      nodes_(batch.nodes),
      ancestors_(ancestors.begin(), ancestors.end()),
      routers_{batch.routes, batch.multiplicity, std::move(statistics), record} {
  ESPALIER_ASSERT(ancestors.size() == batch.ancestors.size());
}

at::Tensor TreeSequence::attention(int64_t layer, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const AttentionOptions& options) const {
  AttentionContext context;
  for (ContextFrame* frame : ancestors_) {
    const LayerContext& leaves = frame->leaves(layer);
    context.k.push_back(leaves[0]);
    context.v.push_back(leaves[1]);
  }
  if (!ancestors_.empty()) {
    context.blocks = context_blocks_;
    context.positions = context_positions_;
  }
  ForestTokens tokens{subtree_end_};
  if (options.sliding_window > 0) tokens.position = position_ids_.to(at::kInt);
  return tree_attention(q, k, v, tokens, options, context);
}

std::vector<at::Tensor> TreeSequence::cut_context(int64_t layer) const {
  if (ancestors_.empty()) return {};
  return ancestors_.back()->leaves(layer);
}

}  // namespace espalier
