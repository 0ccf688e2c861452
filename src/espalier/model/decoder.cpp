// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/decoder.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cmath>
#include <numbers>
#include <span>
#include <string>
#include <utility>

#include "espalier/ops/checks.h"

namespace espalier {
namespace {

/// Angle per position of each rotated pair, [rotary_dim / 2], in float32 and in the order of operations of
/// Transformers (modeling_rope_utils), so that the angles agree to the last bit.
at::Tensor make_inverse_frequencies(const DecoderConfig& config) {
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const int64_t dim = config.rotary_dim > 0 ? config.rotary_dim : config.head_dim;
  const at::Tensor exponents = at::arange(0, dim, 2, options) / dim;
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

/// `dtype` and `device`: those that all must have.
void check_tensors(const char* kind, const std::vector<ParameterShape>& shapes,
                   const std::vector<Parameter>& parameters, at::ScalarType dtype, at::Device device) {
  TORCH_CHECK(parameters.size() == shapes.size(), "Decoder: expected ", shapes.size(), " ", kind,
              ", received ", parameters.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Parameter& given = parameters[i];
    TORCH_CHECK(given.name == shapes[i].name && given.value.sizes() == at::IntArrayRef(shapes[i].shape),
                "Decoder: expected ", shapes[i].name, " of shape ", at::IntArrayRef(shapes[i].shape),
                ", received ", given.name, " of shape ", given.value.sizes());
    TORCH_CHECK(given.value.is_floating_point() && given.value.scalar_type() == dtype, "Decoder: expected ",
                kind, " of one floating dtype, ", dtype, ", received ", given.value.scalar_type(), " for ",
                given.name);
    TORCH_CHECK(given.value.device() == device, "Decoder: expected one device, ", device, ", received ",
                given.value.device(), " for ", given.name);
  }
}

void check_parameters(const DecoderConfig& config, const std::vector<Parameter>& parameters,
                      const std::vector<Parameter>& buffers) {
  TORCH_CHECK(!parameters.empty(), "Decoder: expected parameters, received none");
  const at::Tensor& first = parameters.front().value;
  check_tensors("parameters", parameter_shapes(config), parameters, first.scalar_type(), first.device());
  check_tensors("buffers", buffer_shapes(config), buffers, detail::accumulator_dtype(first.scalar_type()),
                first.device());
}

}  // namespace

Decoder::Layer Decoder::make_layer(const LayerSpec& spec, const NamedParameters& parameters,
                                   const NamedParameters& buffers, double rms_norm_eps) {
  using Mlp = decltype(Layer::mlp);
  struct MakeMlp {
    const NamedParameters &parameters, &buffers;
    Mlp operator()(const DenseMlpSpec&) const { return DenseMlp(parameters, "mlp"); }
    Mlp operator()(const MoeSpec& moe) const { return MoeMlp(moe, parameters, buffers); }
  };
  return {
      std::visit([&](const AttentionSpec& mixer) { return AttentionLayer(mixer, parameters, rms_norm_eps); },
                 spec.mixer),
      std::visit(MakeMlp{parameters, buffers}, spec.mlp), parameters.at("input_layernorm.weight"),
      parameters.at("post_attention_layernorm.weight")};
}

Decoder::Decoder(DecoderConfig config, std::vector<Parameter> parameters, std::vector<Parameter> buffers)
    : config_(std::move(config)), parameters_(std::move(parameters)), buffers_(std::move(buffers)) {
  check_parameters(config_, parameters_, buffers_);
  const NamedParameters all(parameters_, "");
  embed_tokens_ = all.at("model.embed_tokens.weight");
  std::span<const Parameter> rest(parameters_);
  rest = rest.subspan(1);
  const ModelSpec spec = model_spec(config_);
  for (const LayerSpec& layer : spec.layers) {
    const size_t count = layer_parameters(layer, spec.hidden_size).size();
    const std::string prefix = layer_prefix(static_cast<int64_t>(layers_.size()));
    layers_.push_back(
        make_layer(layer, {rest.first(count), prefix}, {buffers_, prefix}, config_.rms_norm_eps));
    rest = rest.subspan(count);
  }
  norm_ = all.at("model.norm.weight");
  lm_head_ = config_.tie_word_embeddings ? embed_tokens_ : all.at("lm_head.weight");
  inverse_frequencies_ = make_inverse_frequencies(config_).to(embed_tokens_.device());
}

std::vector<Parameter> zero_buffers(const DecoderConfig& config, at::ScalarType dtype, at::Device device) {
  std::vector<Parameter> buffers;
  for (const ParameterShape& buffer : buffer_shapes(config)) {
    buffers.push_back({buffer.name, at::zeros(buffer.shape, at::TensorOptions(device).dtype(dtype))});
  }
  return buffers;
}

PositionTables Decoder::position_tables(const at::Tensor& position_ids) const {
  // Angles are float32 for every dtype, as in Transformers; a float64 model takes them as they are.
  const at::Tensor angles = position_ids.to(at::kFloat).unsqueeze(-1) * inverse_frequencies_;
  const at::ScalarType dtype = detail::accumulator_dtype(embed_tokens_.scalar_type());
  return {at::cos(angles).to(dtype), at::sin(angles).to(dtype)};
}

at::Tensor Decoder::embed(const at::Tensor& input_ids) const {
  TORCH_CHECK(input_ids.dim() == 1 && input_ids.scalar_type() == at::kLong && input_ids.numel() > 0,
              "Decoder: expected input_ids [T] int64, T > 0, received ", input_ids.sizes(), " ",
              input_ids.scalar_type());
  return accumulating::embedding(embed_tokens_, input_ids);
}

LayerOutput Decoder::layer(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                           const SequenceOps& sequence, const at::Tensor& rows) const {
  RECORD_USER_SCOPE("layer " + std::to_string(index));
  const Layer& layer = layers_.at(index);
  const at::Tensor input = accumulating::rms_norm(hidden, layer.input_layernorm, config_.rms_norm_eps);
  auto [mixed, context] = std::visit(
      [&](const auto& mixer) { return mixer.forward(index, input, tables, sequence, rows); }, layer.mixer);
  const at::Tensor residual = rows.defined() ? hidden.index_select(0, rows) : hidden;
  if (!mixed.defined()) return {residual, std::move(context)};
  const auto [middle, normalised] =
      accumulating::add_rms_norm(residual, mixed, layer.post_attention_layernorm, config_.rms_norm_eps);
  const at::Tensor& mlp_input = normalised;
  return {middle + std::visit([&](const auto& mlp) { return mlp.forward(mlp_input); }, layer.mlp),
          std::move(context)};
}

at::Tensor Decoder::final_norm(const at::Tensor& hidden) const {
  return accumulating::rms_norm(hidden, norm_, config_.rms_norm_eps);
}

at::Tensor Decoder::logprobs(const at::Tensor& hidden, const Edges& edges) const {
  return accumulating::head_logprobs(final_norm(hidden), lm_head_, edges.row, edges.target);
}

at::Tensor Decoder::forward(const at::Tensor& input_ids, const at::Tensor& position_ids,
                            const SequenceOps& sequence) const {
  at::Tensor hidden = embed(input_ids);
  TORCH_CHECK(position_ids.sizes() == input_ids.sizes() && position_ids.scalar_type() == at::kLong,
              "Decoder: expected position_ids like input_ids ", input_ids.sizes(), " int64, received ",
              position_ids.sizes(), " ", position_ids.scalar_type());
  const PositionTables tables = position_tables(position_ids);
  for (int64_t i = 0; i < num_layers(); ++i) hidden = layer(i, hidden, tables, sequence).hidden;
  return final_norm(hidden);
}

}  // namespace espalier
