// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/decoder.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>
#include <string>
#include <utility>

#include "espalier/base/options.h"
#include "espalier/ops/checks.h"

namespace espalier {
namespace {

at::Tensor scaled(const at::Tensor& powers, const LinearRope& rope) {
  return powers.reciprocal() / rope.factor;
}

at::Tensor scaled(const at::Tensor& powers, const Llama3Rope& rope) {
  const at::Tensor plain = powers.reciprocal();
  const auto old_length = static_cast<double>(rope.original_max_position_embeddings);
  const at::Tensor wavelength = plain.reciprocal() * (2 * std::numbers::pi);
  const at::Tensor is_long = wavelength > old_length / rope.low_freq_factor;
  const at::Tensor is_short = wavelength < old_length / rope.high_freq_factor;
  const at::Tensor smooth = (wavelength.reciprocal() * old_length - rope.low_freq_factor) /
                            (rope.high_freq_factor - rope.low_freq_factor);
  const at::Tensor between = (1 - smooth) * plain / rope.factor + smooth * plain;
  return at::where(is_long, plain / rope.factor, at::where(is_short, plain, between));
}

// The interpolation ramp of YaRN, section 3.2: 0 below the pair with beta_fast rotations in the original
// context, 1 above the pair with beta_slow, linear in between.
at::Tensor interpolation_ramp(const YarnRope& rope, double rope_theta, int64_t rotary_dim) {
  const auto dim = static_cast<double>(rotary_dim);
  const auto pair_of_turns = [&](double turns) {
    const auto old_length = static_cast<double>(rope.original_max_position_embeddings);
    return dim * std::log(old_length / (turns * 2 * std::numbers::pi)) / (2 * std::log(rope_theta));
  };
  double low = pair_of_turns(rope.beta_fast), high = pair_of_turns(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  const at::Tensor pair = at::arange(rotary_dim / 2, at::TensorOptions().dtype(at::kFloat));
  return ((pair - low) / (high - low)).clamp(0, 1);
}

}  // namespace

RotaryFrequencies::RotaryFrequencies(const Rope& rope, int64_t rotary_dim) {
  const at::Tensor exponents =
      at::arange(0, rotary_dim, 2, at::TensorOptions().dtype(at::kFloat)) / rotary_dim;
  const at::Tensor powers = at::pow(at::Scalar(rope.rope_theta), exponents);
  if (const auto* linear = std::get_if<LinearRope>(&rope.scaling)) {
    inverse = scaled(powers, *linear);
  } else if (const auto* llama3 = std::get_if<Llama3Rope>(&rope.scaling)) {
    inverse = scaled(powers, *llama3);
  } else if (const auto* yarn = std::get_if<YarnRope>(&rope.scaling)) {
    const at::Tensor kept = 1 - interpolation_ramp(*yarn, rope.rope_theta, rotary_dim);
    inverse = (powers * yarn->factor).reciprocal() * (1 - kept) + powers.reciprocal() * kept;
    attention_factor = yarn->attention_factor;
  } else {
    inverse = powers.reciprocal();
  }
}

namespace {

/// Checks names, shapes, and that all have this dtype and device.
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

RouterContext context_of_rows(RouterContext context, const at::Tensor& rows) {
  if (!rows.defined()) return context;
  if (context.routes.defined()) context.routes = context.routes.index_select(0, rows);
  if (context.multiplicity.defined()) context.multiplicity = context.multiplicity.index_select(0, rows);
  return context;
}

void check_parameters(const DecoderConfig& config, const std::vector<Parameter>& parameters,
                      const std::vector<Parameter>& buffers) {
  TORCH_CHECK(!parameters.empty(), "Decoder: expected parameters, received none");
  const at::Tensor& first = parameters.front().value;
  check_tensors("parameters", parameter_shapes(config), parameters, first.scalar_type(), first.device());
  check_tensors("buffers", buffer_shapes(config), buffers, detail::accumulator_dtype(first.scalar_type()),
                first.device());
}

void set_frozen(const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters) at::Tensor(parameter.value).set_requires_grad(false);
}

/// Checks the adapter and freezes the weights.
void freeze_for(const Adapter& adapter, const DecoderConfig& config, const std::vector<Parameter>& weights) {
  check_adapter(config, adapter);
  const at::Tensor& first = weights.front().value;
  const at::ScalarType dtype = detail::accumulator_dtype(first.scalar_type());
  for (const Parameter& parameter : adapter.parameters) {
    TORCH_CHECK(parameter.value.scalar_type() == dtype && parameter.value.device() == first.device(),
                "Decoder: expected ", parameter.name, " in ", dtype, " on ", first.device(), ", received ",
                parameter.value.scalar_type(), " on ", parameter.value.device());
  }
  set_frozen(weights);
}

}  // namespace

Decoder::Layer Decoder::make_layer(const LayerSpec& spec, const NamedParameters& parameters,
                                   const NamedParameters& buffers, const RouterPlace& place) const {
  using Mixer = decltype(Layer::mixer);
  struct MakeMixer {
    const LayerSpec& spec;
    const NamedParameters& parameters;
    const DecoderConfig& config;
    Mixer operator()(const AttentionSpec& mixer) const {
      const bool second_rope = config.sliding_rope && mixer.sliding_window > 0;
      return AttentionLayer(mixer, parameters,
                            {.rms_norm_eps = config.rms_norm_eps,
                             .zero_centered_norm = spec.zero_centered_norm,
                             .first_table = second_rope ? kTablesOfRope : 0});
    }
    Mixer operator()(const LatentAttentionSpec& mixer) const {
      return LatentAttentionLayer(mixer, parameters);
    }
    Mixer operator()(const SsmSpec& mixer) const {
      return Mamba2Layer(mixer, parameters, config.rms_norm_eps);
    }
    Mixer operator()(const GatedDeltaSpec& mixer) const {
      return GatedDeltaLayer(mixer, parameters, config.rms_norm_eps);
    }
    Mixer operator()(const NoMixer& none) const { return none; }
  };
  using Mlp = decltype(Layer::mlp);
  struct MakeMlp {
    const NamedParameters &parameters, &buffers;
    const RouterPlace& place;
    Mlp operator()(const DenseMlpSpec& mlp) const { return DenseMlp(parameters, mlp); }
    Mlp operator()(const NoMlp& none) const { return none; }
    Mlp operator()(const MoeSpec& moe) const { return MoeMlp(moe, parameters, buffers, place); }
  };
  Layer layer{std::visit(MakeMixer{spec, parameters, config_}, spec.mixer),
              std::visit(MakeMlp{parameters, buffers, place}, spec.mlp)};
  const NormNames names = norm_names(spec);
  const auto weight_of = [&](const std::string& name) {
    return name.empty() ? at::Tensor() : parameters.at(name + ".weight");
  };
  layer.mixer_input_norm = weight_of(names.mixer_input);
  layer.mixer_output_norm = weight_of(names.mixer_output);
  layer.mlp_input_norm = weight_of(names.mlp_input);
  layer.mlp_output_norm = weight_of(names.mlp_output);
  return layer;
}

Decoder::Decoder(DecoderConfig config, std::vector<Parameter> parameters, std::vector<Parameter> buffers,
                 Adapter adapter)
    : config_(std::move(config)),
      weights_(std::move(parameters)),
      buffers_(std::move(buffers)),
      adapter_(std::move(adapter)) {
  check_parameters(config_, weights_, buffers_);
  if (has_adapter()) freeze_for(adapter_, config_, weights_);
  const NamedParameters all(weights_, "", adapter_);
  embed_tokens_ = all.at(config_.parameter_prefix + config_.embedding_name + ".weight");
  std::span<const Parameter> rest(weights_);
  rest = rest.subspan(1);
  RouterPlace place{.num_routers = routers().count()};
  for (const LayerSpec& layer : config_.layers) {
    const size_t count = layer_parameters(layer, config_.hidden_size).size();
    place.layer = static_cast<int64_t>(layers_.size());
    const std::string prefix = layer_prefix(config_, place.layer);
    layers_.push_back(make_layer(layer, {rest.first(count), prefix, adapter_}, {buffers_, prefix}, place));
    if (std::holds_alternative<MoeMlp>(layers_.back().mlp)) ++place.router;
    rest = rest.subspan(count);
  }
  norm_ = all.at(config_.parameter_prefix + config_.final_norm_name + ".weight");
  lm_head_ = {.weight = config_.tie_word_embeddings ? embed_tokens_ : all.at("lm_head.weight"),
              .adapter = all.adapter(kHeadModule)};
  if (const int64_t rotary_dim = config_.rotary_dim(); rotary_dim > 0) {
    ropes_.emplace_back(config_.rope, rotary_dim);
    if (config_.sliding_rope) ropes_.emplace_back(*config_.sliding_rope, rotary_dim);
  }
  for (RotaryFrequencies& rope : ropes_) rope.inverse = rope.inverse.to(embed_tokens_.device());
}

accumulating::AdapterMapsPtr Decoder::adapter_maps() const {
  if (!has_adapter()) return nullptr;
  const NamedParameters all(weights_, "", adapter_);
  auto maps = std::make_shared<accumulating::AdapterMaps>();
  for (size_t i = 0; i < adapter_.parameters.size(); i += 2) {
    const std::string& a = adapter_.parameters[i].name;
    const std::string map = a.substr(0, a.size() - std::string_view(kLoraA).size());
    const at::Tensor& weight = map == kHeadModule ? lm_head_.weight : all.at(map + ".weight");
    maps->emplace(weight.const_data_ptr(), all.adapter(map));
  }
  return maps;
}

void Decoder::freeze() {
  set_frozen(weights_);
  set_frozen(adapter_.parameters);
  is_frozen_ = true;
}

std::vector<Parameter> zero_buffers(const DecoderConfig& config, at::ScalarType dtype, at::Device device) {
  std::vector<Parameter> buffers;
  for (const ParameterShape& buffer : buffer_shapes(config)) {
    buffers.push_back({buffer.name, at::zeros(buffer.shape, at::TensorOptions(device).dtype(dtype))});
  }
  return buffers;
}

PositionTables Decoder::position_tables(const at::Tensor& position_ids) const {
  // Angles are float32 for every dtype, as in Transformers, also for float64 models.
  const at::ScalarType dtype = detail::accumulator_dtype(embed_tokens_.scalar_type());
  PositionTables tables;
  for (const RotaryFrequencies& rope : ropes_) {
    const at::Tensor angles = position_ids.to(at::kFloat).unsqueeze(-1) * rope.inverse;
    for (at::Tensor table : {at::cos(angles), at::sin(angles)}) {
      if (rope.attention_factor != 1) table.mul_(rope.attention_factor);
      tables.push_back(table.to(dtype));
    }
  }
  return tables;
}

at::Tensor Decoder::embed(const at::Tensor& input_ids) const {
  TORCH_CHECK(input_ids.dim() == 1 && input_ids.scalar_type() == at::kLong && input_ids.numel() > 0,
              "Decoder: expected input_ids [T] int64, T > 0, received ", input_ids.sizes(), " ",
              input_ids.scalar_type());
  const int64_t frozen_row = config_.freeze_pad_embedding ? config_.pad_token_id : -1;
  const at::Tensor hidden = accumulating::embedding(embed_tokens_, input_ids, frozen_row);
  if (config_.embedding_multiplier == 1) return hidden;
  if (!config_.round_embedding_multiplier) return hidden * config_.embedding_multiplier;
  return hidden * at::scalar_tensor(config_.embedding_multiplier, hidden.scalar_type()).item<double>();
}

LayerOutput Decoder::layer(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                           const SequenceOps& sequence, const at::Tensor& rows) const {
  RECORD_USER_SCOPE("layer " + std::to_string(index));
  const Layer& layer = layers_.at(index);
  const at::Tensor rounded = hidden.to(embed_tokens_.scalar_type());  // differs with residual_in_fp32
  const at::Tensor input = layer.mixer_input_norm.defined() ? norm(rounded, layer.mixer_input_norm) : hidden;
  const at::Tensor residual = rows.defined() ? hidden.index_select(0, rows) : hidden;
  struct RunMlp {
    const at::Tensor &input, &rows;
    const SequenceOps& sequence;
    at::Tensor operator()(const DenseMlp& mlp) const { return mlp.forward(input); }
    at::Tensor operator()(const NoMlp&) const { return {}; }
    at::Tensor operator()(const MoeMlp& mlp) const {
      return mlp.forward(input, context_of_rows(sequence.routers(), rows));
    }
  };
  const auto run_mlp = [&](const at::Tensor& mlp_input) {
    return std::visit(RunMlp{mlp_input, rows, sequence}, layer.mlp);
  };
  if (std::holds_alternative<NoMixer>(layer.mixer)) {
    if (residual.size(0) == 0) return {residual, {}};
    return {residual + branch(run_mlp(norm(residual, layer.mlp_input_norm)), layer.mlp_output_norm), {}};
  }
  auto [mixed, context] = std::visit(
      [&](const auto& mixer) -> LayerOutput {
        if constexpr (std::is_same_v<std::decay_t<decltype(mixer)>, NoMixer>)
          return {};
        else
          return mixer.forward(index, input, tables, sequence, rows);
      },
      layer.mixer);
  if (!mixed.defined()) return {residual, std::move(context)};
  if (std::holds_alternative<NoMlp>(layer.mlp)) {
    const at::ScalarType dtype =
        config_.residual_in_fp32 ? detail::accumulator_dtype(mixed.scalar_type()) : mixed.scalar_type();
    return {residual.to(dtype) + branch(mixed, layer.mixer_output_norm), std::move(context)};
  }
  const at::Tensor added = branch(mixed, layer.mixer_output_norm);
  if (!layer.mlp_input_norm.defined()) {
    const at::Tensor middle = residual + added;
    return {middle + branch(run_mlp(middle), layer.mlp_output_norm), std::move(context)};
  }
  const auto [middle, normalised] = accumulating::add_rms_norm(
      residual, added, layer.mlp_input_norm, config_.rms_norm_eps, config_.zero_centered_norm());
  return {middle + branch(run_mlp(normalised), layer.mlp_output_norm), std::move(context)};
}

at::Tensor Decoder::norm(const at::Tensor& x, const at::Tensor& weight) const {
  return accumulating::rms_norm(x, weight, config_.rms_norm_eps, config_.zero_centered_norm());
}

at::Tensor Decoder::branch(const at::Tensor& output, const at::Tensor& weight) const {
  const at::Tensor normed = weight.defined() ? norm(output, weight) : output;
  return config_.residual_multiplier == 1 ? normed : normed * config_.residual_multiplier;
}

at::Tensor Decoder::final_norm(const at::Tensor& hidden) const {
  const at::Tensor normalised = norm(hidden, norm_).to(norm_.scalar_type());
  return config_.logits_scaling == 1 ? normalised : normalised / config_.logits_scaling;
}

at::Tensor Decoder::capped(const at::Tensor& logits) const {
  const double cap = config_.final_logit_softcapping;
  return cap > 0 ? logits.div(cap).tanh().mul(cap) : logits;
}

at::Tensor Decoder::logprobs(const at::Tensor& hidden, const Edges& edges) const {
  if (config_.final_logit_softcapping > 0 || edges.temperature.defined())
    return distribution(hidden, edges).logprobs;
  return accumulating::head_logprobs(final_norm(hidden), lm_head_, edges.row, edges.target);
}

EdgeDistribution Decoder::distribution(const at::Tensor& hidden, const Edges& edges) const {
  return accumulating::head_distribution(
      final_norm(hidden), lm_head_, edges.row, edges.target,
      {.edge_temperature = edges.temperature, .softcap = config_.final_logit_softcapping});
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

void add_freeze_pad_embedding(OptionList* list, bool* freeze) {
  list->add(
      "freeze-pad-embedding", freeze,
      "Give the input embedding of config.json's pad_token_id no gradient, as Transformers does; a tied LM "
      "head still trains it. Without this flag it is trained like any other, because trajectories have no "
      "padding and the token may be a real one, such as the end of a turn",
      {.group = kMachineGroup});
}

}  // namespace espalier
