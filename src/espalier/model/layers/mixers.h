// SPDX-License-Identifier: Apache-2.0
// The token-mixing half of a decoder layer: attention, latent attention, Gated DeltaNet or Mamba-2, with its
// projections.
//
// `forward` of each takes normalised hidden states [T, hidden_size], and returns the branch output of the
// selected rows (see Model::layer; undefined if there are none) and the context at the sequence's cuts.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "espalier/config/layer_spec.h"
#include "espalier/model/layers/parameters.h"
#include "espalier/model/model.h"

namespace espalier {

/// Projections, norms of queries and keys, rotary embedding, attention.
class AttentionLayer {
 public:
  struct Options {
    double rms_norm_eps;
    bool zero_centered_norm = false;  // for the norms of q and k
    int64_t first_table = 0;          // index of the layer's cos in PositionTables; sin follows
  };
  AttentionLayer(const AttentionSpec& spec, const NamedParameters& parameters, const Options& options);

  /// The context: keys and values.
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

/// Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values of low rank.
class LatentAttentionLayer {
 public:
  LatentAttentionLayer(const LatentAttentionSpec& spec, const NamedParameters& parameters);

  /// The context: keys [T, H, qk_head_dim] and values [T, H, v_head_dim].
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

/// Gated DeltaNet: projections, convolution, gated delta rule, gated norm.
class GatedDeltaLayer {
 public:
  GatedDeltaLayer(const GatedDeltaSpec& spec, const NamedParameters& parameters, double rms_norm_eps);

  /// The context: states [C, H, Dk, Dv] in the accumulator dtype, and the convolution's tails [C, W - 1,
  /// channels]. Arithmetic as of Transformers' Qwen3_5GatedDeltaNet, gates and decays in float32 (float64 for
  /// float64).
  LayerOutput forward(int64_t index, const at::Tensor& hidden, const PositionTables&,
                      const SequenceOps& sequence, const at::Tensor& rows) const;

 private:
  /// q, k and v [T, conv_size()] before the convolution, z [T, value_size()], b and a [T, H].
  std::vector<at::Tensor> project(const at::Tensor& hidden) const;

  GatedDeltaSpec spec_;
  double rms_norm_eps_;
  std::vector<accumulating::Projection> in_;  // qkv, z, b and a; fused: qkvz and ba
  accumulating::Projection out_;
  at::Tensor conv_;             // [channels, 1, W]
  at::Tensor dt_bias_, a_log_;  // [H]
  at::Tensor norm_;             // [Dv]
};

/// Mamba-2: projection, convolution, selective state space, gated norm.
class Mamba2Layer {
 public:
  Mamba2Layer(const SsmSpec& spec, const NamedParameters& parameters, double rms_norm_eps);

  /// The context: states [C, H, N, P] in the accumulator dtype, and the convolution's tails [C, W - 1,
  /// channels]. Arithmetic as of Transformers' Mamba2Mixer; steps, decays and the gated norm in float32
  /// (float64 for float64).
  LayerOutput forward(int64_t index, const at::Tensor& hidden, const PositionTables&,
                      const SequenceOps& sequence, const at::Tensor& rows) const;

 private:
  at::Tensor steps(const at::Tensor& dt) const;  // [T, H] of dt [T, H], in the accumulator dtype
  at::Tensor gated_norm(const at::Tensor& x, const at::Tensor& gate) const;  // [R, H P] of these sizes

  SsmSpec spec_;
  double rms_norm_eps_;
  accumulating::Projection in_, out_, conv_;  // the weight of conv_ [channels, 1, W]
  at::Tensor dt_bias_, a_log_, d_;            // [H]
  at::Tensor norm_;                           // [H P]
};

}  // namespace espalier
