// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/layer_spec.h"

#include <cmath>
#include <set>
#include <utility>

namespace espalier {
namespace {

using Shapes = std::vector<ParameterShape>;

void append_projection(const std::string& name, int64_t out, int64_t in, bool bias, Shapes* shapes) {
  shapes->push_back({name + ".weight", {out, in}});
  if (bias) shapes->push_back({name + ".bias", {out}});
}

void append_parameters(const AttentionSpec& attention, int64_t hidden, Shapes* shapes) {
  const std::string module = attention.name + ".";
  const int64_t query = attention.num_attention_heads * attention.head_dim;
  const int64_t key = attention.num_key_value_heads * attention.head_dim;
  if (attention.sinks) shapes->push_back({module + "sinks", {attention.num_attention_heads}});
  if (attention.fused) {
    append_projection(module + "qkv_proj", query + 2 * key, hidden, attention.bias, shapes);
  } else {
    append_projection(module + "q_proj", attention.output_gate ? 2 * query : query, hidden, attention.bias,
                      shapes);
    append_projection(module + "k_proj", key, hidden, attention.bias, shapes);
    append_projection(module + "v_proj", key, hidden, attention.bias, shapes);
  }
  append_projection(module + "o_proj", hidden, query, attention.output_bias, shapes);
  if (attention.query_key_norm) {
    const bool all = attention.query_key_norm_over_heads;
    shapes->push_back({module + "q_norm.weight", {all ? query : attention.head_dim}});
    shapes->push_back({module + "k_norm.weight", {all ? key : attention.head_dim}});
  }
}

void append_parameters(const LatentAttentionSpec& attention, int64_t hidden, Shapes* shapes) {
  const int64_t heads = attention.num_attention_heads, rank = attention.kv_lora_rank;
  if (attention.q_lora_rank > 0) {
    append_projection("self_attn.q_a_proj", attention.q_lora_rank, hidden, attention.bias, shapes);
    shapes->push_back({"self_attn.q_a_layernorm.weight", {attention.q_lora_rank}});
    append_projection("self_attn.q_b_proj", attention.query_size(), attention.q_lora_rank, /*bias=*/false,
                      shapes);
  } else {
    append_projection("self_attn.q_proj", attention.query_size(), hidden, /*bias=*/false, shapes);
  }
  append_projection("self_attn.kv_a_proj_with_mqa", rank + attention.qk_rope_head_dim, hidden, attention.bias,
                    shapes);
  shapes->push_back({"self_attn.kv_a_layernorm.weight", {rank}});
  append_projection("self_attn.kv_b_proj", heads * attention.qk_nope_head_dim + attention.value_size(), rank,
                    /*bias=*/false, shapes);
  append_projection("self_attn.o_proj", hidden, attention.value_size(), attention.bias, shapes);
}

void append_parameters(const GatedDeltaSpec& delta, int64_t hidden, Shapes* shapes) {
  const int64_t heads = delta.linear_num_value_heads;
  shapes->push_back({"linear_attn.dt_bias", {heads}});
  shapes->push_back({"linear_attn.A_log", {heads}});
  shapes->push_back({"linear_attn.conv1d.weight", {delta.conv_size(), 1, delta.linear_conv_kernel_dim}});
  shapes->push_back({"linear_attn.norm.weight", {delta.linear_value_head_dim}});
  append_projection("linear_attn.out_proj", hidden, delta.value_size(), /*bias=*/false, shapes);
  if (delta.fused_projections) {
    append_projection("linear_attn.in_proj_qkvz", delta.conv_size() + delta.value_size(), hidden,
                      /*bias=*/false, shapes);
    append_projection("linear_attn.in_proj_ba", 2 * heads, hidden, /*bias=*/false, shapes);
    return;
  }
  append_projection("linear_attn.in_proj_qkv", delta.conv_size(), hidden, /*bias=*/false, shapes);
  append_projection("linear_attn.in_proj_z", delta.value_size(), hidden, /*bias=*/false, shapes);
  append_projection("linear_attn.in_proj_b", heads, hidden, /*bias=*/false, shapes);
  append_projection("linear_attn.in_proj_a", heads, hidden, /*bias=*/false, shapes);
}

void append_parameters(const SsmSpec& ssm, int64_t hidden, Shapes* shapes) {
  const std::string module = ssm.name + ".";
  for (const char* name : {"dt_bias", "A_log", "D"}) shapes->push_back({module + name, {ssm.num_heads}});
  shapes->push_back({module + "conv1d.weight", {ssm.conv_size(), 1, ssm.conv_kernel}});
  if (ssm.use_conv_bias) shapes->push_back({module + "conv1d.bias", {ssm.conv_size()}});
  append_projection(module + "in_proj", ssm.projection_size(), hidden, ssm.use_bias, shapes);
  shapes->push_back({module + "norm.weight", {ssm.inner_size()}});
  append_projection(module + "out_proj", hidden, ssm.inner_size(), ssm.use_bias, shapes);
}

void append_parameters(const DenseMlpSpec& mlp, int64_t hidden, Shapes* shapes) {
  const std::string module = mlp.name + ".";
  const int64_t width = mlp.intermediate_size;
  if (mlp.names.gated())
    append_projection(module + mlp.names.gate, mlp.names.fused() ? 2 * width : width, hidden, mlp.bias,
                      shapes);
  if (!mlp.names.fused()) append_projection(module + mlp.names.up, width, hidden, mlp.bias, shapes);
  append_projection(module + mlp.names.down, hidden, width, mlp.bias, shapes);
}

void append_stacked_experts(const MoeSpec& moe, int64_t hidden, Shapes* shapes) {
  const int64_t experts = moe.num_experts, width = moe.moe_intermediate_size;
  shapes->push_back({moe.experts_name + ".gate_up_proj", {experts, hidden, 2 * width}});
  shapes->push_back({moe.experts_name + ".gate_up_proj_bias", {experts, 2 * width}});
  shapes->push_back({moe.experts_name + ".down_proj", {experts, width, hidden}});
  shapes->push_back({moe.experts_name + ".down_proj_bias", {experts, hidden}});
}

void append_parameters(const MoeSpec& moe, int64_t hidden, Shapes* shapes) {
  append_projection(moe.router_name, moe.num_experts, hidden, moe.clamped_swiglu.has_value(), shapes);
  const auto append_mlp = [&](const std::string& name, int64_t width) {
    append_parameters(DenseMlpSpec{.intermediate_size = width, .names = moe.names, .name = name}, hidden,
                      shapes);
  };
  if (moe.clamped_swiglu) {
    append_stacked_experts(moe, hidden, shapes);
  } else {
    for (int64_t i = 0; i < moe.num_experts; ++i) {
      append_mlp(moe.experts_name + "." + std::to_string(i), moe.moe_intermediate_size);
    }
  }
  if (moe.shared_intermediate_size > 0) append_mlp(moe.shared_name, moe.shared_intermediate_size);
  if (moe.shared_expert_gate) append_projection("mlp.shared_expert_gate", 1, hidden, /*bias=*/false, shapes);
}

void append_parameters(const NoMlp&, int64_t, Shapes*) {}

void append_parameters(const NoMixer&, int64_t, Shapes*) {}

// Newer fields are written only if they are not the default, so that older files stay valid.
nlohmann::ordered_json to_json(const AttentionSpec& attention) {
  nlohmann::ordered_json json = {{"type", "attention"},
                                 {"num_attention_heads", attention.num_attention_heads},
                                 {"num_key_value_heads", attention.num_key_value_heads},
                                 {"head_dim", attention.head_dim},
                                 {"attention_bias", attention.bias},
                                 {"attention_output_bias", attention.output_bias},
                                 {"query_key_norm", attention.query_key_norm}};
  if (attention.query_key_norm_over_heads) json["query_key_norm_over_heads"] = true;
  if (attention.sliding_window > 0) json["sliding_window"] = attention.sliding_window;
  if (attention.sinks) json["sinks"] = true;
  if (!attention.rotary) json["rotary"] = false;
  if (attention.rotary_interleaved) json["rotary_interleaved"] = true;
  if (attention.fused) json["fused"] = true;
  if (attention.attention_multiplier > 0) json["attention_multiplier"] = attention.attention_multiplier;
  if (attention.softcap > 0) json["attn_logit_softcapping"] = attention.softcap;
  if (attention.rotary_dim > 0) json["rotary_dim"] = attention.rotary_dim;
  if (attention.output_gate) json["attn_output_gate"] = true;
  return json;
}

nlohmann::ordered_json to_json(const LatentAttentionSpec& attention) {
  return {{"type", "latent_attention"},
          {"num_attention_heads", attention.num_attention_heads},
          {"q_lora_rank", attention.q_lora_rank},
          {"kv_lora_rank", attention.kv_lora_rank},
          {"qk_nope_head_dim", attention.qk_nope_head_dim},
          {"qk_rope_head_dim", attention.qk_rope_head_dim},
          {"v_head_dim", attention.v_head_dim},
          {"attention_bias", attention.bias},
          {"rope_interleave", attention.rope_interleave},
          {"softmax_scale", attention.softmax_scale}};
}

nlohmann::ordered_json to_json(const GatedDeltaSpec& delta) {
  nlohmann::ordered_json json = {{"type", "gated_delta"},
                                 {"linear_num_key_heads", delta.linear_num_key_heads},
                                 {"linear_num_value_heads", delta.linear_num_value_heads},
                                 {"linear_key_head_dim", delta.linear_key_head_dim},
                                 {"linear_value_head_dim", delta.linear_value_head_dim},
                                 {"linear_conv_kernel_dim", delta.linear_conv_kernel_dim}};
  if (delta.fused_projections) json["fused_projections"] = true;
  return json;
}

nlohmann::ordered_json to_json(const SsmSpec& ssm) {
  // JSON has no infinity.
  const nlohmann::ordered_json most =
      std::isinf(ssm.most_time_step) ? nlohmann::ordered_json() : nlohmann::ordered_json(ssm.most_time_step);
  return {{"type", ssm.name == "mixer" ? "mamba2" : ssm.name},
          {"num_heads", ssm.num_heads},
          {"head_dim", ssm.head_dim},
          {"state_size", ssm.state_size},
          {"n_groups", ssm.n_groups},
          {"conv_kernel", ssm.conv_kernel},
          {"use_bias", ssm.use_bias},
          {"use_conv_bias", ssm.use_conv_bias},
          {"time_step_limit", {ssm.least_time_step, most}}};
}

nlohmann::ordered_json to_json(const DenseMlpSpec& mlp) {
  nlohmann::ordered_json json = {
      {"type", "dense"}, {"intermediate_size", mlp.intermediate_size}, {"mlp_bias", mlp.bias}};
  if (mlp.names.fused()) json["fused"] = true;
  if (mlp.activation == Activation::kGeluTanh) json["hidden_act"] = "gelu_pytorch_tanh";
  if (!mlp.names.gated()) json["hidden_act"] = "relu2";
  return json;
}

const char* to_string(RouterScores scores) {
  if (scores == RouterScores::kSoftmaxOverChosen) return "softmax_over_chosen";
  return scores == RouterScores::kSigmoid ? "sigmoid" : "softmax";
}

nlohmann::ordered_json to_json(const MoeSpec& moe) {
  nlohmann::ordered_json json = {{"type", "moe"},
                                 {"num_experts", moe.num_experts},
                                 {"num_experts_per_tok", moe.num_experts_per_tok},
                                 {"moe_intermediate_size", moe.moe_intermediate_size},
                                 {"scores", to_string(moe.scores)},
                                 {"norm_topk_prob", moe.norm_topk_prob},
                                 {"routed_scaling_factor", moe.routed_scaling_factor},
                                 {"e_score_correction_bias", moe.correction_bias},
                                 {"n_group", moe.n_group},
                                 {"topk_group", moe.topk_group},
                                 {"shared_intermediate_size", moe.shared_intermediate_size}};
  if (moe.shared_expert_gate) json["shared_expert_gate"] = true;
  if (moe.names.fused()) json["fused"] = true;
  if (!moe.names.gated()) json["hidden_act"] = "relu2";
  if (moe.clamped_swiglu) {
    json["swiglu_alpha"] = moe.clamped_swiglu->swiglu_alpha;
    json["swiglu_limit"] = moe.clamped_swiglu->swiglu_limit;
  }
  return json;
}

nlohmann::ordered_json to_json(const NoMlp&) {
  return {{"type", "none"}};
}

nlohmann::ordered_json to_json(const NoMixer&) {
  return {{"type", "none"}};
}

}  // namespace

int64_t ModelSpec::rotary_dim() const {
  for (const LayerSpec& layer : layers) {
    if (const auto* latent = std::get_if<LatentAttentionSpec>(&layer.mixer)) return latent->qk_rope_head_dim;
    const auto* attention = std::get_if<AttentionSpec>(&layer.mixer);
    if (attention != nullptr && attention->rotary)
      return attention->rotary_dim > 0 ? attention->rotary_dim : attention->head_dim;
  }
  return 0;
}

std::vector<int64_t> ModelSpec::sliding_windows() const {
  std::set<int64_t> windows;
  for (const LayerSpec& layer : layers) {
    const auto* attention = std::get_if<AttentionSpec>(&layer.mixer);
    if (attention != nullptr && attention->sliding_window > 0) windows.insert(attention->sliding_window);
  }
  return {windows.begin(), windows.end()};
}

nlohmann::ordered_json to_json(const LayerSpec& layer) {
  const auto part = [](const auto& alternative) { return to_json(alternative); };
  nlohmann::ordered_json json = {{"mixer", std::visit(part, layer.mixer)},
                                 {"mlp", std::visit(part, layer.mlp)}};
  if (layer.norm_outputs) json["norm_outputs"] = true;
  if (layer.norm_outputs && layer.norm_inputs) json["norm_inputs"] = true;
  if (layer.zero_centered_norm) json["zero_centered_norm"] = true;
  return json;
}

NormNames norm_names(const LayerSpec& layer) {
  NormNames names;
  if (layer.norm_inputs) (layer.has_mixer() ? names.mixer_input : names.mlp_input) = layer.input_norm_name;
  if (!layer.has_mlp() || !layer.has_mixer()) return names;
  if (layer.norm_outputs) {
    names.mixer_output = "post_attention_layernorm";
    names.mlp_output = "post_feedforward_layernorm";
  }
  if (layer.norm_inputs)
    names.mlp_input = layer.norm_outputs ? "pre_feedforward_layernorm" : "post_attention_layernorm";
  return names;
}

std::vector<ParameterShape> layer_parameters(const LayerSpec& layer, int64_t hidden_size) {
  Shapes shapes;
  const auto append = [&](const auto& part) { append_parameters(part, hidden_size, &shapes); };
  std::visit(append, layer.mixer);
  std::visit(append, layer.mlp);
  const NormNames norms = norm_names(layer);
  for (const std::string& name : {norms.mixer_input, norms.mixer_output, norms.mlp_input, norms.mlp_output}) {
    if (!name.empty()) shapes.push_back({name + ".weight", {hidden_size}});
  }
  return shapes;
}

std::string layer_prefix(const ModelSpec& spec, int64_t index) {
  return spec.parameter_prefix + "layers." + std::to_string(index) + ".";
}

std::vector<ParameterShape> parameter_shapes(const ModelSpec& spec) {
  Shapes shapes{
      {spec.parameter_prefix + spec.embedding_name + ".weight", {spec.vocab_size, spec.hidden_size}}};
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const std::string prefix = layer_prefix(spec, static_cast<int64_t>(i));
    for (ParameterShape& parameter : layer_parameters(spec.layers[i], spec.hidden_size)) {
      shapes.push_back({prefix + parameter.name, std::move(parameter.shape)});
    }
  }
  shapes.push_back({spec.parameter_prefix + spec.final_norm_name + ".weight", {spec.hidden_size}});
  if (!spec.tie_word_embeddings) {
    shapes.push_back({"lm_head.weight", {spec.vocab_size, spec.hidden_size}});
  }
  return shapes;
}

std::vector<ParameterShape> buffer_shapes(const ModelSpec& spec) {
  Shapes shapes;
  for (int64_t i = 0; i < spec.num_hidden_layers(); ++i) {
    const auto* moe = std::get_if<MoeSpec>(&spec.layers[i].mlp);
    if (moe == nullptr || !moe->correction_bias) continue;
    shapes.push_back(
        {layer_prefix(spec, i) + moe->router_name + ".e_score_correction_bias", {moe->num_experts}});
  }
  return shapes;
}

RouterShape router_shape(const ModelSpec& spec) {
  RouterShape shape;
  for (int64_t i = 0; i < spec.num_hidden_layers(); ++i) {
    const auto* moe = std::get_if<MoeSpec>(&spec.layers[i].mlp);
    if (moe == nullptr) continue;
    shape.layers.push_back(i);
    shape.experts = moe->num_experts;
    shape.top_k = moe->num_experts_per_tok;
  }
  return shape;
}

}  // namespace espalier
