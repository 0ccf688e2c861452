// SPDX-License-Identifier: Apache-2.0
// The attention half of a decoder layer: projections, norms of queries and keys, rotary embedding, attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "espalier/config/layer_spec.h"
#include "espalier/model/layers/parameters.h"
#include "espalier/model/model.h"

namespace espalier {

class AttentionLayer {
 public:
  struct Options {
    double rms_norm_eps;
    bool zero_centered_norm = false;  // for the norms of q and k
    int64_t first_table = 0;          // index of the layer's cos in PositionTables; sin follows
  };
  AttentionLayer(const AttentionSpec& spec, const NamedParameters& parameters, const Options& options);

  /// Takes normalised hidden states [T, hidden_size]. Returns the branch output of the selected rows (see
  /// Model::layer; undefined if there are none), and the context k, v.
  LayerOutput forward(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                      const SequenceOps& sequence, const at::Tensor& rows) const;

 private:
  /// Queries, with their gates, keys and values [T, ...]. `context_only`: queries may be undefined.
  struct Projected {
    at::Tensor q, k, v;
  };
  Projected project(const at::Tensor& hidden, bool context_only) const;
  at::Tensor rotated_heads(at::Tensor heads, const std::optional<at::Tensor>& norm,
                           const PositionTables& tables) const;

  AttentionSpec spec_;
  Options options_;
  std::vector<accumulating::Projection> in_;  // k, v and q, or one of q, k and v
  accumulating::Projection o_;
  std::optional<at::Tensor> q_norm_, k_norm_;  // [head_dim], or [heads * head_dim]
  at::Tensor sinks_;                           // [num_attention_heads]; undefined without sinks
};

}  // namespace espalier
