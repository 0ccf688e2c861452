// Decoder-only transformers (llama, qwen2, qwen3) over a list of tokens whose visibility is somebody else's.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "espalier/model/config.h"
#include "espalier/model/parameter_ops.h"

namespace espalier {

/// Attention over one list of tokens: q [T, H, D], k and v [T, K, D], rotated; returns [T, H, D].
using Attention = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           double softmax_scale)>;

/// What a layer leaves to the descendants of a micro-batch, as tensors that carry gradients. An attention
/// layer: k (rotated) and v [T, K, D] of the micro-batch's tokens.
using LayerContext = std::vector<at::Tensor>;

struct Parameter {
  std::string name;  // as in the checkpoint: model.layers.0.self_attn.q_proj.weight
  at::Tensor value;  // leaf, requires_grad
};

/// Names and shapes of the parameters of a config, in checkpoint order. Tied models have no lm_head.weight.
struct ParameterShape {
  std::string name;
  std::vector<int64_t> shape;
};
std::vector<ParameterShape> parameter_shapes(const DecoderConfig& config);

class Decoder {
 public:
  /// `parameters` must be those of parameter_shapes(config), in that order, of one floating dtype, on one
  /// device.
  Decoder(DecoderConfig config, std::vector<Parameter> parameters);

  /// Final hidden states (after the last norm) [T, hidden_size] of input_ids [T] int64 at position_ids [T]
  /// int64. Norms and rotary angles are computed in float32 as in Transformers; norms in float64 for float64.
  /// The gradient of the embedding is complete; Transformers leaves out the row of pad_token_id where the
  /// config has one (padding_idx of torch.nn.Embedding), even if that token is also the end of every turn.
  at::Tensor forward(const at::Tensor& input_ids, const at::Tensor& position_ids,
                     const Attention& attention) const;

  /// The same in parts, for who wants to do something between layers:
  /// forward = final_norm(layer(L - 1, ... layer(0, embed(input_ids), ...))).
  struct RotaryTables {
    at::Tensor cos, sin;  // [T, head_dim / 2]
  };
  struct LayerOutput {
    at::Tensor hidden;  // [T, hidden_size], or [R, hidden_size] of R tokens
    LayerContext context;
  };
  at::Tensor embed(const at::Tensor& input_ids) const;
  RotaryTables rotary_tables(const at::Tensor& position_ids) const;
  /// `rows` [R] int64, ascending: the tokens whose hidden state is wanted, all where it is undefined. What
  /// lies behind the attention is computed for them alone, and nothing but the context where there are none.
  LayerOutput layer(int64_t index, const at::Tensor& hidden, const RotaryTables& tables,
                    const Attention& attention, const at::Tensor& rows = {}) const;
  at::Tensor final_norm(const at::Tensor& hidden) const;

  /// LM head [vocab_size, hidden_size]; the embedding where tied.
  const at::Tensor& lm_head_weight() const;

  const DecoderConfig& config() const { return config_; }
  /// Of parameters and everything computed from them.
  at::Device device() const { return embed_tokens_.device(); }
  const std::vector<Parameter>& parameters() const { return parameters_; }

  /// Gradients of all parameters, in their order, summed over backward passes since zero_gradients in float32
  /// (float64 for float64 models): their .grad (model/parameter_ops.h). Undefined where there were none.
  std::vector<at::Tensor> gradients() const;
  void zero_gradients() const;

 private:
  struct Layer {
    summing::Projection q, k, v, o, gate, up, down;
    std::optional<at::Tensor> q_norm, k_norm;              // [head_dim]
    at::Tensor input_layernorm, post_attention_layernorm;  // [hidden_size]
  };
  at::Tensor rotated_heads(const at::Tensor& projected, const std::optional<at::Tensor>& norm,
                           const RotaryTables& tables) const;
  LayerOutput attend(const Layer& layer, const at::Tensor& hidden, const RotaryTables& tables,
                     const Attention& attention, const at::Tensor& rows) const;
  at::Tensor mlp(const Layer& layer, const at::Tensor& input) const;

  DecoderConfig config_;
  std::vector<Parameter> parameters_;
  // The same tensors as in parameters_, by their place in the network.
  at::Tensor embed_tokens_, norm_, lm_head_;
  std::vector<Layer> layers_;
  at::Tensor inverse_frequencies_;  // [head_dim / 2] float32
};

}  // namespace espalier
