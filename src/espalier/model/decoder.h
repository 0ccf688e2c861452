// SPDX-License-Identifier: Apache-2.0
// Decoder-only transformers, built from layer specs (config/layer_spec.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <variant>
#include <vector>

#include "espalier/config/config.h"
#include "espalier/config/layer_spec.h"
#include "espalier/model/adapter.h"
#include "espalier/model/layers/mixers.h"
#include "espalier/model/layers/mlps.h"
#include "espalier/model/model.h"
#include "espalier/model/row_adapters.h"

namespace espalier {

/// Rotary embedding of `rotary_dim` elements of a head. Computed in float32 in the order of operations of
/// Transformers (modeling_rope_utils), so that the tables are bitwise identical.
struct RotaryFrequencies {
  at::Tensor inverse;           // [rotary_dim / 2] float32: angle per position
  double attention_factor = 1;  // scale of cos and sin

  RotaryFrequencies() = default;
  RotaryFrequencies(const Rope& rope, int64_t rotary_dim);
};

class OptionList;

class Decoder : public Model {
 public:
  /// `parameters`: those of parameter_shapes(config), in order, of one floating dtype, on one device.
  /// `buffers`: those of buffer_shapes(config), in order, in the accumulator dtype (float32, float64 for
  /// float64), on that device. `adapter`: parameters in the accumulator dtype on that device; `parameters`
  /// are then frozen (do not require grad).
  Decoder(DecoderConfig config, std::vector<Parameter> parameters, std::vector<Parameter> buffers = {},
          Adapter adapter = {});

  /// Final hidden states (of final_norm) [T, hidden_size] of input_ids [T] int64 at position_ids [T]
  /// int64. Norms and rotary angles are computed in float32 as in Transformers; norms in float64 for float64.
  /// The pad token's embedding gets a gradient unless freeze_pad_embedding was called.
  at::Tensor forward(const at::Tensor& input_ids, const at::Tensor& position_ids,
                     const SequenceOps& sequence) const;

  int64_t num_layers() const override { return config_.num_hidden_layers(); }
  int64_t vocab_size() const override { return config_.vocab_size; }
  std::vector<int64_t> sliding_windows() const override { return config_.sliding_windows(); }
  RouterShape routers() const override { return router_shape(config_); }
  at::Tensor embed(const at::Tensor& input_ids) const override;
  PositionTables position_tables(const at::Tensor& position_ids) const override;
  LayerOutput layer(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                    const SequenceOps& sequence, const at::Tensor& rows = {}) const override;
  at::Tensor logprobs(const at::Tensor& hidden, const Edges& edges) const override;
  EdgeDistribution distribution(const at::Tensor& hidden, const Edges& edges) const override;
  const std::vector<Parameter>& parameters() const override {
    if (is_frozen_) return kNone;
    return has_adapter() ? adapter_.parameters : weights_;
  }
  /// The parameters of parameter_shapes(config); without an adapter the same as parameters() unless frozen.
  const std::vector<Parameter>& weights() const { return weights_; }
  const std::vector<Parameter>& buffers() const { return buffers_; }
  bool has_adapter() const { return !adapter_.parameters.empty(); }
  const Adapter& adapter() const { return adapter_; }
  /// The adapter, for passes of another decoder of these weights (row_adapters.h); null: none.
  accumulating::AdapterMapsPtr adapter_maps() const;
  /// Disables the gradient of `embed` for the row of pad_token_id, as Transformers does. A tied LM head still
  /// contributes. No effect if the config has no pad_token_id.
  void freeze_pad_embedding() { config_.freeze_pad_embedding = true; }
  /// Trains nothing from now on: parameters() is empty, and neither weights nor adapter get gradients.
  void freeze();
  bool is_frozen() const { return is_frozen_; }
  /// The dtype of weights and activations.
  at::ScalarType dtype() const { return embed_tokens_.scalar_type(); }
  at::Device device() const override { return embed_tokens_.device(); }

  /// The input of the LM head, from the last layer's hidden states [..., hidden_size]: the final norm,
  /// divided by logits_scaling.
  at::Tensor final_norm(const at::Tensor& hidden) const;

  /// Logits [..., V] of the LM head with the softcap of the config.
  at::Tensor capped(const at::Tensor& logits) const;

  /// LM head [vocab_size, hidden_size]; the embedding if tied. Without a bias.
  const accumulating::Projection& lm_head() const { return lm_head_; }

  const DecoderConfig& config() const { return config_; }

 private:
  struct Layer {
    std::variant<AttentionLayer, GatedDeltaLayer, Mamba2Layer, LatentAttentionLayer, NoMixer> mixer;
    std::variant<DenseMlp, MoeMlp, NoMlp> mlp;
    // [hidden_size]; undefined where the layer has no such norm.
    at::Tensor mixer_input_norm = {}, mixer_output_norm = {}, mlp_input_norm = {}, mlp_output_norm = {};
  };
  Layer make_layer(const LayerSpec& spec, const NamedParameters& parameters, const NamedParameters& buffers,
                   const RouterPlace& place) const;

  at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) const;

  /// What is added for the output of a mixer or MLP: its norm, if `weight` is defined, times
  /// residual_multiplier.
  at::Tensor branch(const at::Tensor& output, const at::Tensor& weight) const;

  static constexpr int64_t kTablesOfRope = 2;  // cos and sin

  static inline const std::vector<Parameter> kNone;

  DecoderConfig config_;
  std::vector<Parameter> weights_, buffers_;
  Adapter adapter_;
  bool is_frozen_ = false;
  // Aliases of tensors in weights_ and of the adapter.
  at::Tensor embed_tokens_, norm_;
  accumulating::Projection lm_head_;
  std::vector<Layer> layers_;
  std::vector<RotaryFrequencies> ropes_;  // for all layers; or for full attention, then for sliding windows
};

/// Zero-filled buffers, with which routers choose by their scores alone.
std::vector<Parameter> zero_buffers(const DecoderConfig& config, at::ScalarType dtype, at::Device device);

/// Adds the option --freeze-pad-embedding.
void add_freeze_pad_embedding(OptionList* list, bool* freeze);

}  // namespace espalier
