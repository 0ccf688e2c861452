// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <limits>
#include <map>

#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/families/ssm_keys.h"

namespace espalier {
namespace {

constexpr SsmKeys kSizes{.num_heads = {"mamba_num_heads", 128},
                         .head_dim = {"mamba_head_dim", 64},
                         .state_size = {"ssm_state_size", 128},
                         .n_groups = {"n_groups", 8},
                         .conv_kernel = {"conv_kernel", 4},
                         .expand = {"", 0},
                         .use_bias = "use_bias",
                         .use_conv_bias = "use_conv_bias"};

/// The layers' kinds as in hybrid_override_pattern, the older key: M (Mamba-2), * (attention), - (an MLP) or
/// E (experts).
std::string read_pattern(const ConfigReader& config) {
  const std::map<nlohmann::json, char> letters = {
      {"linear_attention", 'M'}, {"mamba", 'M'}, {"full_attention", '*'},
      {"attention", '*'},        {"mlp", '-'},   {"moe", 'E'}};
  const std::string old_key = "hybrid_override_pattern", other_name = "layer_types";
  const std::string key = config.find(other_name) != nullptr ? other_name : "layers_block_type";
  std::string pattern;
  if (const nlohmann::json* types = config.find(key)) {
    for (const nlohmann::json& type : *types) {
      const auto letter = letters.find(type);
      pattern += letter == letters.end() ? '?' : letter->second;
    }
  } else {
    pattern = config.text(old_key);
  }
  if (pattern.empty() || pattern.size() > kMostLayers ||
      pattern.find_first_not_of("M*-E") != std::string::npos) {
    config.refuse(config.find(key) != nullptr ? key : old_key,
                  "\"linear_attention\", \"full_attention\", \"mlp\" or \"moe\" (M, *, - or E) by layer");
  }
  const auto size = static_cast<int64_t>(pattern.size());
  if (config.positive_integer("num_hidden_layers", kMostLayers, size) != size) {
    config.refuse("num_hidden_layers", fmt::format("{}, as many as layers are named", size));
  }
  return pattern;
}

MoeSpec read_mixture(const ConfigReader& config, const MlpNames& names) {
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false in a model with experts");
  if (config.find("moe_latent_size") != nullptr) config.refuse("moe_latent_size", "null");
  MoeSpec moe = read_grouped_experts(config);
  moe.shared_intermediate_size =
      config.positive_integer("moe_shared_expert_intermediate_size", kMostIntermediate, 7688);
  moe.names = names;
  moe.router_name = "mixer.gate";
  moe.experts_name = "mixer.experts";
  moe.shared_name = "mixer.shared_experts";
  return moe;
}

void refuse_other_values(const ConfigReader& config, int64_t head_dim) {
  config.require_text("mamba_hidden_act", "silu");
  config.require_text("mlp_hidden_act", "relu2");
  for (const char* key : {"attention_bias", "tie_word_embeddings"}) {
    if (config.boolean(key, false)) config.refuse(key, "false");
  }
  if (config.find("sliding_window") != nullptr) config.refuse("sliding_window", "null");
  if (config.positive_integer("attention_head_dim", kMostHeadDim, head_dim) != head_dim) {
    config.refuse("attention_head_dim", fmt::format("head_dim, {}", head_dim));
  }
}

void read_nemotron_h(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  auto [attention, mlp] = common;
  refuse_other_values(config, attention.head_dim);
  attention.rotary = false;
  attention.name = mlp.name = "mixer";
  mlp.names.gate = "";
  mlp.bias = config.boolean("mlp_bias", false);
  SsmInit& init = result->ssm_init.emplace(SsmInit{.plain = true});
  read_ssm_init(config, /*rescale_prenorm_residual=*/true, &init);
  SsmSpec ssm = read_ssm_keys(config, kSizes, result->hidden_size);
  // Not time_step_limit, which Transformers ignores.
  ssm.least_time_step = init.time_step_min;
  ssm.most_time_step = std::numeric_limits<double>::infinity();
  result->layers.clear();
  for (const char kind : read_pattern(config)) {
    result->layers.push_back({.mixer = NoMixer(), .mlp = NoMlp(), .input_norm_name = "norm"});
    LayerSpec& layer = result->layers.back();
    if (kind == 'M') layer.mixer = ssm;
    if (kind == '*') layer.mixer = attention;
    if (kind == '-') layer.mlp = mlp;
    if (kind == 'E') layer.mlp = read_mixture(config, mlp.names);
  }
  result->rms_norm_eps = config.positive_number("layer_norm_epsilon", 1e-5);
  result->parameter_prefix = "backbone.";
  result->module_prefix = "model.";
  result->embedding_name = "embeddings";
  result->final_norm_name = "norm_f";
}

}  // namespace

constexpr ModelFamily kNemotronHFamily{
    .model_type = "nemotron_h",
    .max_position_embeddings = 4096,
    .num_key_value_heads = 8,
    .head_dim = 128,
    .padding_row = false,
    .counts_layers = true,
    // auto_map: released files name their own classes, from before Transformers had the family. It ignores
    // expand, mamba_proj_bias, norm_eps, residual_in_fp32 and n_shared_experts, of which there is one. The
    // others affect neither results nor layers before those of multi-token prediction.
    .keys =
        "auto_map mamba_head_dim attention_head_dim hybrid_override_pattern chunk_size mamba_hidden_act "
        "layer_norm_epsilon moe_intermediate_size conv_kernel mamba_num_heads layers_block_type "
        "moe_shared_expert_intermediate_size expand mamba_proj_bias mamba_ssm_cache_dtype "
        "moe_shared_expert_overlap n_group mlp_hidden_act n_routed_experts mtp_hybrid_override_pattern "
        "n_groups norm_topk_prob n_shared_experts mtp_layers_block_type norm_eps ssm_state_size "
        "num_experts_per_tok num_nextn_predict_layers time_step_max time_step_floor num_local_experts "
        "rescale_prenorm_residual time_step_min time_step_limit num_logits_to_keep routed_scaling_factor "
        "topk_group time_step_rank residual_in_fp32 use_bias use_conv_bias use_mamba_kernels",
    .bias_keys =
        "mixer.conv1d.=use_conv_bias mixer.in_proj.=use_bias mixer.out_proj.=use_bias "
        "mixer.up_proj.=mlp_bias mixer.down_proj.=mlp_bias",
    .read = read_nemotron_h,
    .read_rope = [](const ConfigReader&, DecoderConfig*) {},
};

}  // namespace espalier
