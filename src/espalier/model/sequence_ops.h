// SPDX-License-Identifier: Apache-2.0
// The operations in which tokens of a sequence or tree interact.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/model/node_structure.h"
#include "espalier/model/router_statistics.h"
#include "espalier/ops/attention/tree_attention.h"

namespace espalier {

/// All interactions between tokens. A model uses only these, so the same model runs on a micro-batch of a
/// tree (engine/forward.h) and on a plain sequence (verify/causal_sequence.h).
class SequenceOps {
 public:
  virtual ~SequenceOps() = default;

  /// Attention of layer `layer`: q [T, H, D], k and v [T, K, D], rotated; returns [T, H, D]. A token attends
  /// to itself and the tokens before it on its path, including the context of ancestors, within the options'
  /// sliding window.
  virtual at::Tensor attention(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const AttentionOptions& options) const = 0;

  /// The tree structure of the tokens, for recurrences and convolutions.
  virtual const NodeStructure& nodes() const = 0;

  /// LayerOutput::context of layer `layer` of the last ancestor at its cuts, which roots continue
  /// (NodeStructure::prev). Empty without ancestors.
  virtual std::vector<at::Tensor> cut_context(int64_t layer) const = 0;

  /// Inputs for the routers of a mixture of experts.
  virtual RouterContext routers() const { return {}; }
};

}  // namespace espalier
