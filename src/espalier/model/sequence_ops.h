// SPDX-License-Identifier: Apache-2.0
// How a layer sees the tokens that it works on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/model/node_structure.h"
#include "espalier/model/router_context.h"
#include "espalier/ops/attention/tree_attention.h"

namespace espalier {

/// Everything in which tokens of a list read one another. A model calls these and nothing else, so the same
/// model runs on a micro-batch of a tree (engine/tree_sequence.h) and on a plain sequence
/// (verify/causal_sequence.h).
class SequenceOps {
 public:
  virtual ~SequenceOps() = default;

  /// Attention of layer `layer`: q [T, H, D], k and v [T, K, D], rotated; returns [T, H, D]. A token reads
  /// itself and the tokens before it on its path, those in the context of ancestors included, as far as the
  /// options' sliding window reaches.
  virtual at::Tensor attention(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const AttentionOptions& options) const = 0;

  /// How the tokens branch, for layers that walk along paths: recurrences and convolutions.
  virtual const NodeStructure& nodes() const = 0;

  /// What layer `layer` of the last ancestor left at its cuts, at which roots go on (NodeStructure::prev):
  /// the tensors of its LayerOutput::context. None where there is no ancestor.
  virtual std::vector<at::Tensor> cut_context(int64_t layer) const = 0;

  /// What routers of a mixture of experts are given of the tokens.
  virtual RouterContext routers() const { return {}; }
};

}  // namespace espalier
