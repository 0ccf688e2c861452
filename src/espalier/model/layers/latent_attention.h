// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values of low rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "espalier/config/layer_spec.h"
#include "espalier/model/layers/parameters.h"
#include "espalier/model/model.h"

namespace espalier {

class LatentAttentionLayer {
 public:
  LatentAttentionLayer(const LatentAttentionSpec& spec, const NamedParameters& parameters);

  /// As AttentionLayer::forward. The context: keys [T, H, qk_head_dim] and values [T, H, v_head_dim].
  /// Arithmetic as of Transformers' DeepseekV3Attention.
  LayerOutput forward(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                      const SequenceOps& sequence, const at::Tensor& rows) const;

 private:
  at::Tensor rotated(at::Tensor heads, const PositionTables& tables) const;

  LatentAttentionSpec spec_;
  accumulating::Projection kv_a_, kv_b_, o_;
  accumulating::Projection q_;                   // of the hidden state
  std::optional<accumulating::Projection> q_b_;  // of the output of q_, if that has low rank
  at::Tensor q_norm_, kv_norm_;                  // [q_lora_rank], [kv_lora_rank]
};

}  // namespace espalier
