// SPDX-License-Identifier: Apache-2.0
// Layers as data. The families (config/families/) create them from a config.json. Everything that depends on
// the kind of a layer follows from its LayerSpec: names and shapes of parameters here, costs in
// plan/layer_cost.h, construction in model/. A new kind of layer is a new alternative of one of these
// variants.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/config/moe_spec.h"
#include "espalier/config/recurrence_specs.h"

namespace espalier {

/// Softmax attention with grouped heads and, by default, rotary positions.
struct AttentionSpec {
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  bool bias = false;                       // of q, k and v
  bool fused = false;                      // q, k and v are one matrix, qkv_proj
  bool output_bias = false;                // of o
  bool query_key_norm = false;             // RMSNorm of q and k, per head
  bool query_key_norm_over_heads = false;  // over all heads at once instead
  int64_t sliding_window = 0;              // visible tokens per query, itself included; 0: all before it
  bool sinks = false;                      // a learned logit per head in the softmax's denominator
  bool rotary = true;                      // queries and keys are rotated by their positions
  bool rotary_interleaved = false;         // neighbours are rotated together, not halves of a head
  int64_t rotary_dim = 0;                  // leading elements of a head that are rotated; 0: all
  double attention_multiplier = 0;         // scale of the scores; 0: 1 / sqrt(head_dim)
  double softcap = 0;                      // scores s become softcap * tanh(s / softcap); 0: as they are
  bool output_gate = false;                // q_proj returns each head's queries, then the gates of its output
  std::string name = "self_attn";          // of the module in a checkpoint

  bool operator==(const AttentionSpec&) const = default;
};

/// Of an MLP's gate: silu, or gelu approximated by tanh (gelu_pytorch_tanh).
enum class Activation { kSilu, kGeluTanh };

/// Multi-head latent attention (DeepSeek-V2, 2024): queries, and keys and values, are projected from norms of
/// projections of low rank. Keys end in rotated elements that the heads share. Names as in config.json.
struct LatentAttentionSpec {
  int64_t num_attention_heads = 0;
  int64_t q_lora_rank = 0;  // 0: queries are projected from the hidden state
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;  // the elements that are rotated
  int64_t v_head_dim = 0;        // at most qk_head_dim()
  bool bias = false;             // of o and of the maps that read the hidden state, but for q_proj
  bool rope_interleave = true;   // neighbours are rotated together, not halves
  double softmax_scale = 0;

  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int64_t query_size() const { return num_attention_heads * qk_head_dim(); }
  int64_t value_size() const { return num_attention_heads * v_head_dim; }

  bool operator==(const LatentAttentionSpec&) const = default;
};

/// See MlpNames.
struct DenseMlpSpec {
  int64_t intermediate_size = 0;
  bool bias = false;
  Activation activation = Activation::kSilu;
  MlpNames names = {};
  std::string name = "mlp";  // of the module in a checkpoint

  bool operator==(const DenseMlpSpec&) const = default;
};

/// A layer that ends after its mixer.
struct NoMlp {
  bool operator==(const NoMlp&) const = default;
};

/// A layer that is an MLP alone.
struct NoMixer {
  bool operator==(const NoMixer&) const = default;
};

/// The part of a layer that mixes tokens, and the part that works on each token separately.
using MixerSpec = std::variant<AttentionSpec, GatedDeltaSpec, SsmSpec, LatentAttentionSpec, NoMixer>;
using MlpSpec = std::variant<DenseMlpSpec, MoeSpec, NoMlp>;

/// A layer: x + mixer(norm(x)), then, if it has an MLP, x + mlp(norm(x)).
struct LayerSpec {
  MixerSpec mixer;
  MlpSpec mlp;
  bool norm_inputs = true;          // of mixer and MLP; false: x + mixer(x) and x + mlp(x)
  bool norm_outputs = false;        // x + norm(mixer(...)) and x + norm(mlp(...)), in layers with an MLP
  bool zero_centered_norm = false;  // norms of hidden states, q and k multiply by 1 + weight

  std::string input_norm_name = "input_layernorm";  // of the layer's first norm in a checkpoint

  bool has_mixer() const { return !std::holds_alternative<NoMixer>(mixer); }
  bool has_mlp() const { return !std::holds_alternative<NoMlp>(mlp); }

  bool operator==(const LayerSpec&) const = default;
};

/// Names of a layer's norms of hidden states in a checkpoint, in its order; "": none.
struct NormNames {
  std::string mixer_input, mixer_output, mlp_input, mlp_output;
};
NormNames norm_names(const LayerSpec& layer);

/// Everything that determines a decoder's parameters and cost.
struct ModelSpec {
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  bool tie_word_embeddings = false;
  std::vector<LayerSpec> layers;            // first to last
  int64_t rope_tables = 1;                  // pairs of cos and sin tables that the layers share
  std::string parameter_prefix = "model.";  // of all parameters but the LM head
  /// In its place in the names of Transformers' modules, which PEFT uses, if these differ; "": the same.
  std::string module_prefix{};
  std::string embedding_name = "embed_tokens";
  std::string final_norm_name = "norm";

  int64_t num_hidden_layers() const { return static_cast<int64_t>(layers.size()); }
  /// The spec of the first layer that has such a mixer or MLP; nullptr if there is none.
  const AttentionSpec* attention() const { return first<AttentionSpec>(&LayerSpec::mixer); }
  const SsmSpec* ssm() const { return first<SsmSpec>(&LayerSpec::mixer); }
  const DenseMlpSpec* dense_mlp() const { return first<DenseMlpSpec>(&LayerSpec::mlp); }
  const MoeSpec* moe() const { return first<MoeSpec>(&LayerSpec::mlp); }
  template <typename Part, typename Alternatives>
  const Part* first(Alternatives LayerSpec::* part) const {
    for (const LayerSpec& layer : layers) {
      if (const auto* found = std::get_if<Part>(&(layer.*part))) return found;
    }
    return nullptr;
  }
  /// The elements of a head that are rotated; 0 without rotary positions.
  int64_t rotary_dim() const;
  /// Applies to all norms of hidden states, including the final one.
  bool zero_centered_norm() const { return !layers.empty() && layers.back().zero_centered_norm; }
  /// The sizes of the layers' windows, ascending, each once.
  std::vector<int64_t> sliding_windows() const;

  bool operator==(const ModelSpec&) const = default;
};

/// A layer under Hugging Face's names, for files that record which models they are valid for. Equal exactly
/// for layers that differ at most in names of modules.
nlohmann::ordered_json to_json(const LayerSpec& layer);

struct ParameterShape {
  std::string name;
  std::vector<int64_t> shape;
};

/// Parameters of a layer in the order of a checkpoint, without the layer's prefix: "self_attn.q_proj.weight".
std::vector<ParameterShape> layer_parameters(const LayerSpec& layer, int64_t hidden_size);

/// "model.layers.3."
std::string layer_prefix(const ModelSpec& spec, int64_t index);

/// Names and shapes of all parameters, in the order of a checkpoint. Tied models have no lm_head.weight.
std::vector<ParameterShape> parameter_shapes(const ModelSpec& spec);

/// Names and shapes of the tensors of a checkpoint that training does not change, in the order of the layers:
/// correction biases of routers. In the dtype of sums, whatever the model's.
std::vector<ParameterShape> buffer_shapes(const ModelSpec& spec);

/// The routers of a model: each sends a token to `top_k` of `experts`.
struct RouterShape {
  std::vector<int64_t> layers;  // layers with a router, ascending; empty: a model without experts
  int64_t experts = 0;
  int64_t top_k = 0;

  int64_t count() const { return static_cast<int64_t>(layers.size()); }
};

RouterShape router_shape(const ModelSpec& spec);

}  // namespace espalier
