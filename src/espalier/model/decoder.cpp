#include "espalier/model/decoder.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise.h"

namespace espalier {
namespace {

/// Angle per position of each rotated pair, [head_dim / 2], in float32 and in the order of operations of
/// Transformers (modeling_rope_utils), so that the angles agree to the last bit.
at::Tensor make_inverse_frequencies(const DecoderConfig& config) {
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor exponents = at::arange(0, config.head_dim, 2, options) / config.head_dim;
  const at::Tensor plain = at::pow(at::Scalar(config.rope_theta), exponents).reciprocal();
  if (!config.llama3_rope) return plain;

  const Llama3Rope& rope = *config.llama3_rope;
  const auto old_length = static_cast<double>(rope.original_max_position_embeddings);
  const at::Tensor wavelength = plain.reciprocal() * (2 * std::numbers::pi);
  const at::Tensor is_long = wavelength > old_length / rope.low_freq_factor;
  const at::Tensor is_short = wavelength < old_length / rope.high_freq_factor;
  const at::Tensor smooth = (wavelength.reciprocal() * old_length - rope.low_freq_factor) /
                            (rope.high_freq_factor - rope.low_freq_factor);
  const at::Tensor between = (1 - smooth) * plain / rope.factor + smooth * plain;
  return at::where(is_long, plain / rope.factor, at::where(is_short, plain, between));
}

// The rows of x [T, ...] that are wanted: all where `rows` is undefined.
at::Tensor selected(const at::Tensor& x, const at::Tensor& rows) {
  return rows.defined() ? x.index_select(0, rows) : x;
}

}  // namespace

std::vector<ParameterShape> parameter_shapes(const DecoderConfig& config) {
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t q_size = config.num_attention_heads * config.head_dim;
  const int64_t kv_size = config.num_key_value_heads * config.head_dim;
  std::vector<ParameterShape> shapes;
  const auto projection = [&](const std::string& name, int64_t out, int64_t in, bool bias) {
    shapes.push_back({name + ".weight", {out, in}});
    if (bias) shapes.push_back({name + ".bias", {out}});
  };

  shapes.push_back({"model.embed_tokens.weight", {config.vocab_size, hidden}});
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    projection(layer + "self_attn.q_proj", q_size, hidden, config.attention_bias);
    projection(layer + "self_attn.k_proj", kv_size, hidden, config.attention_bias);
    projection(layer + "self_attn.v_proj", kv_size, hidden, config.attention_bias);
    projection(layer + "self_attn.o_proj", hidden, q_size, config.attention_output_bias);
    if (config.query_key_norm) {
      shapes.push_back({layer + "self_attn.q_norm.weight", {config.head_dim}});
      shapes.push_back({layer + "self_attn.k_norm.weight", {config.head_dim}});
    }
    projection(layer + "mlp.gate_proj", inner, hidden, config.mlp_bias);
    projection(layer + "mlp.up_proj", inner, hidden, config.mlp_bias);
    projection(layer + "mlp.down_proj", hidden, inner, config.mlp_bias);
    shapes.push_back({layer + "input_layernorm.weight", {hidden}});
    shapes.push_back({layer + "post_attention_layernorm.weight", {hidden}});
  }
  shapes.push_back({"model.norm.weight", {hidden}});
  if (!config.tie_word_embeddings) shapes.push_back({"lm_head.weight", {config.vocab_size, hidden}});
  return shapes;
}

Decoder::Decoder(DecoderConfig config, std::vector<Parameter> parameters)
    : config_(std::move(config)), parameters_(std::move(parameters)) {
  const std::vector<ParameterShape> shapes = parameter_shapes(config_);
  TORCH_CHECK(parameters_.size() == shapes.size(), "Decoder: expected ", shapes.size(),
              " parameters, received ", parameters_.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Parameter& given = parameters_[i];
    TORCH_CHECK(given.name == shapes[i].name && given.value.sizes() == at::IntArrayRef(shapes[i].shape),
                "Decoder: expected ", shapes[i].name, " of shape ", at::IntArrayRef(shapes[i].shape),
                ", received ", given.name, " of shape ", given.value.sizes());
    TORCH_CHECK(given.value.is_floating_point() &&
                    given.value.scalar_type() == parameters_.front().value.scalar_type(),
                "Decoder: expected one floating dtype, received ", given.value.scalar_type(), " for ",
                given.name);
    TORCH_CHECK(given.value.device() == parameters_.front().value.device(), "Decoder: expected one device, ",
                parameters_.front().value.device(), ", received ", given.value.device(), " for ", given.name);
  }

  // Parameters come in the order of parameter_shapes, so taking them one after another finds each its place.
  size_t next = 0;
  const auto take = [&] { return parameters_[next++].value; };
  const auto take_projection = [&](bool bias) {
    summing::Projection projection{take()};
    if (bias) projection.bias = take();
    return projection;
  };
  embed_tokens_ = take();
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    Layer& layer = layers_.emplace_back();
    layer.q = take_projection(config_.attention_bias);
    layer.k = take_projection(config_.attention_bias);
    layer.v = take_projection(config_.attention_bias);
    layer.o = take_projection(config_.attention_output_bias);
    if (config_.query_key_norm) {
      layer.q_norm = take();
      layer.k_norm = take();
    }
    layer.gate = take_projection(config_.mlp_bias);
    layer.up = take_projection(config_.mlp_bias);
    layer.down = take_projection(config_.mlp_bias);
    layer.input_layernorm = take();
    layer.post_attention_layernorm = take();
  }
  norm_ = take();
  lm_head_ = config_.tie_word_embeddings ? embed_tokens_ : take();
  inverse_frequencies_ = make_inverse_frequencies(config_).to(embed_tokens_.device());
}

Decoder::RotaryTables Decoder::rotary_tables(const at::Tensor& position_ids) const {
  // Angles are float32 for every dtype, as in Transformers; a float64 model takes them as they are.
  const at::Tensor angles = position_ids.to(at::kFloat).unsqueeze(-1) * inverse_frequencies_;
  const at::ScalarType dtype = detail::accumulator_dtype(embed_tokens_.scalar_type());
  return {at::cos(angles).to(dtype), at::sin(angles).to(dtype)};
}

at::Tensor Decoder::rotated_heads(const at::Tensor& projected, const std::optional<at::Tensor>& norm,
                                  const RotaryTables& tables) const {
  at::Tensor heads = projected.view({projected.size(0), -1, config_.head_dim});
  if (norm) heads = summing::rms_norm(heads, *norm, config_.rms_norm_eps);
  return rotary(heads, tables.cos, tables.sin);
}

Decoder::LayerOutput Decoder::attend(const Layer& layer, const at::Tensor& hidden, const RotaryTables& tables,
                                     const Attention& attention, const at::Tensor& rows) const {
  RECORD_USER_SCOPE("attention");
  const bool context_only = rows.defined() && rows.numel() == 0;
  std::vector<summing::Projection> projections{layer.k, layer.v};
  if (!context_only) projections.push_back(layer.q);
  const std::vector<at::Tensor> projected = summing::linears(hidden, projections);
  const at::Tensor k = rotated_heads(projected[0], layer.k_norm, tables);
  const at::Tensor v = projected[1].view(k.sizes());
  if (context_only) return {{}, {k, v}};
  const at::Tensor q = rotated_heads(projected[2], layer.q_norm, tables);
  const double softmax_scale = std::pow(static_cast<double>(config_.head_dim), -0.5);
  at::Tensor out = attention(q, k, v, softmax_scale);
  TORCH_CHECK(out.sizes() == q.sizes(), "Decoder: attention returned shape ", out.sizes(), ", expected ",
              q.sizes());
  out = selected(out.reshape({q.size(0), -1}), rows);
  return {summing::linear(out, layer.o), {k, v}};
}

at::Tensor Decoder::mlp(const Layer& layer, const at::Tensor& input) const {
  RECORD_USER_SCOPE("mlp");
  const std::vector<at::Tensor> inner = summing::linears(input, {layer.gate, layer.up});
  return summing::linear(swiglu(inner[0], inner[1]), layer.down);
}

at::Tensor Decoder::embed(const at::Tensor& input_ids) const {
  TORCH_CHECK(input_ids.dim() == 1 && input_ids.scalar_type() == at::kLong && input_ids.numel() > 0,
              "Decoder: expected input_ids [T] int64, T > 0, received ", input_ids.sizes(), " ",
              input_ids.scalar_type());
  return summing::embedding(embed_tokens_, input_ids);
}

Decoder::LayerOutput Decoder::layer(int64_t index, const at::Tensor& hidden, const RotaryTables& tables,
                                    const Attention& attention, const at::Tensor& rows) const {
  RECORD_USER_SCOPE("layer " + std::to_string(index));
  const Layer& layer = layers_.at(index);
  const at::Tensor attention_input = summing::rms_norm(hidden, layer.input_layernorm, config_.rms_norm_eps);
  auto [attended, context] = attend(layer, attention_input, tables, attention, rows);
  const at::Tensor residual = selected(hidden, rows);
  if (!attended.defined()) return {residual, std::move(context)};
  const auto [middle, input] =
      summing::add_rms_norm(residual, attended, layer.post_attention_layernorm, config_.rms_norm_eps);
  return {middle + mlp(layer, input), std::move(context)};
}

at::Tensor Decoder::final_norm(const at::Tensor& hidden) const {
  return summing::rms_norm(hidden, norm_, config_.rms_norm_eps);
}

at::Tensor Decoder::forward(const at::Tensor& input_ids, const at::Tensor& position_ids,
                            const Attention& attention) const {
  at::Tensor hidden = embed(input_ids);
  TORCH_CHECK(position_ids.sizes() == input_ids.sizes() && position_ids.scalar_type() == at::kLong,
              "Decoder: expected position_ids like input_ids ", input_ids.sizes(), " int64, received ",
              position_ids.sizes(), " ", position_ids.scalar_type());
  const RotaryTables tables = rotary_tables(position_ids);
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) hidden = layer(i, hidden, tables, attention).hidden;
  return final_norm(hidden);
}

std::vector<at::Tensor> Decoder::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const Parameter& parameter : parameters_) gradients.push_back(parameter.value.grad());
  return gradients;
}

void Decoder::zero_gradients() const {
  for (const Parameter& parameter : parameters_) at::Tensor(parameter.value).mutable_grad().reset();
}

const at::Tensor& Decoder::lm_head_weight() const {
  return lm_head_;
}

}  // namespace espalier
