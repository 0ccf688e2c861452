// SPDX-License-Identifier: Apache-2.0
// Layers as data: what a decoder is made of. The families (config/families/) read it off a config.json.
// Everything that depends on the kind of a layer follows from its LayerSpec: names and shapes of parameters
// here, costs in plan/layer_cost.h, construction in model/. A new kind of layer is a new alternative of one
// of these variants.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/config/gated_delta_spec.h"
#include "espalier/config/moe_spec.h"
#include "espalier/config/ssm_spec.h"

namespace espalier {

/// Softmax attention with grouped heads and, as a rule, rotary positions.
struct AttentionSpec {
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  bool bias = false;                       // of q, k and v
  bool output_bias = false;                // of o
  bool query_key_norm = false;             // RMSNorm of q and k, per head
  bool query_key_norm_over_heads = false;  // over all heads at once instead
  int64_t sliding_window = 0;              // tokens that a token sees, itself included; 0: all before it
  bool sinks = false;                      // a learned logit per head in the softmax's denominator
  bool rotary = true;                      // queries and keys are rotated by their positions
  int64_t rotary_dim = 0;                  // leading elements of a head that are rotated; 0: all
  double attention_multiplier = 0;         // scale of the scores; 0: 1 / sqrt(head_dim)
  bool output_gate = false;                // q_proj gives each head's queries, then gates of its output

  bool operator==(const AttentionSpec&) const = default;
};

/// silu(gate(x)) * up(x), then down.
struct DenseMlpSpec {
  int64_t intermediate_size = 0;
  bool bias = false;
  bool fused = false;        // gate and up are one matrix, input_linear, beside output_linear
  std::string name = "mlp";  // of the module in a checkpoint

  bool operator==(const DenseMlpSpec&) const = default;
};

/// A layer that ends after its mixer.
struct NoMlp {
  bool operator==(const NoMlp&) const = default;
};

/// What lets tokens see each other in a layer, and what works on each token by itself.
using MixerSpec = std::variant<AttentionSpec, GatedDeltaSpec, SsmSpec>;
using MlpSpec = std::variant<DenseMlpSpec, MoeSpec, NoMlp>;

/// A layer: x + mixer(norm(x)), then, where it has an MLP, x + mlp(norm(x)).
struct LayerSpec {
  MixerSpec mixer;
  MlpSpec mlp;
  bool norm_outputs = false;        // x + norm(mixer(x)), then x + norm(mlp(x)) instead
  bool zero_centered_norm = false;  // norms of hidden states, q and k multiply by 1 + weight

  std::string input_norm_name = "input_layernorm";  // of the norm before the mixer in a checkpoint

  bool has_mlp() const { return !std::holds_alternative<NoMlp>(mlp); }

  bool operator==(const LayerSpec&) const = default;
};

/// What decides the parameters of a decoder and the cost of running it.
struct ModelSpec {
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  bool tie_word_embeddings = false;
  std::vector<LayerSpec> layers;            // first to last
  int64_t rope_tables = 1;                  // pairs of tables of cos and sin that the layers read
  std::string parameter_prefix = "model.";  // of all parameters but the LM head
  std::string embedding_name = "embed_tokens";
  std::string final_norm_name = "norm";

  int64_t num_hidden_layers() const { return static_cast<int64_t>(layers.size()); }
  /// Of the first layer that has such a mixer or MLP; null where none has.
  const AttentionSpec* attention() const;
  const SsmSpec* ssm() const;
  const DenseMlpSpec* dense_mlp() const;
  const MoeSpec* moe() const;
  /// Of all norms of hidden states, the last one included.
  bool zero_centered_norm() const { return !layers.empty() && layers.back().zero_centered_norm; }
  /// The sizes of the layers' windows, ascending, each once.
  std::vector<int64_t> sliding_windows() const;

  bool operator==(const ModelSpec&) const = default;
};

/// A layer under Hugging Face's names, for files that say what they are valid for. Equal exactly for layers
/// that are equal but for names of modules.
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

/// Names and shapes of what the layers read of a checkpoint and training leaves as it is, in the order of the
/// layers: correction biases of routers. In the dtype of sums, whatever the model's.
std::vector<ParameterShape> buffer_shapes(const ModelSpec& spec);

}  // namespace espalier
