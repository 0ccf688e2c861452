// SPDX-License-Identifier: Apache-2.0
// A micro-batch of a tree as SequenceOps for the layers of a model.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <vector>

#include "espalier/engine/batch.h"
#include "espalier/engine/context_frame.h"
#include "espalier/model/sequence_ops.h"

namespace espalier {

/// Holds its tensors by value, because recomputed layers use it after the forward pass.
class TreeSequence : public SequenceOps {
 public:
  /// `ancestors`: the frames of batch.ancestors, in that order; they must outlive the backward pass.
  /// `statistics`, `record`: see RouterContext.
  TreeSequence(const Batch& batch, std::span<ContextFrame* const> ancestors,
               c10::intrusive_ptr<RouterStatistics> statistics = {}, RouterRecord* record = nullptr);

  at::Tensor attention(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOptions& options) const override;
  const NodeStructure& nodes() const override { return *nodes_; }
  std::vector<at::Tensor> cut_context(int64_t layer) const override;
  RouterContext routers() const override { return routers_; }

 private:
  at::Tensor subtree_end_, position_ids_;
  at::Tensor context_blocks_, context_positions_;
  std::shared_ptr<const NodeStructure> nodes_;
  std::vector<ContextFrame*> ancestors_;
  RouterContext routers_;
};

}  // namespace espalier
