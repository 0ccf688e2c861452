// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "espalier/config/families/family.h"
#include "espalier/config/families/ssm_keys.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

void read_granite(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  auto [attention, mlp] = common;
  read_biases(config, &attention, &mlp);
  read_multipliers(config, &attention, result);
  refuse_sliding_windows(config, result->num_hidden_layers());
  result->layers.assign(result->layers.size(), {attention, mlp});
}

constexpr const char* kPositions = "position_embedding_type";

constexpr SsmKeys kGraniteMoeHybridSizes{.num_heads = {"mamba_n_heads", 128},
                                         .head_dim = {"mamba_d_head", 0},
                                         .state_size = {"mamba_d_state", 256},
                                         .n_groups = {"mamba_n_groups", 1},
                                         .conv_kernel = {"mamba_d_conv", 4},
                                         .expand = {"mamba_expand", 2},
                                         .use_bias = "mamba_proj_bias",
                                         .use_conv_bias = "mamba_conv_bias"};

/// Sets the mixer on the state space layers, by layer_types or layers_block_type, its older name; on all
/// layers if neither is given.
void set_ssm_layers(const ConfigReader& config, const SsmSpec& mixer, DecoderConfig* result) {
  const int64_t num_hidden_layers = result->num_hidden_layers();
  const std::string old_key = "layers_block_type", new_key = "layer_types";
  const bool has_new = config.find(new_key) != nullptr;
  if (has_new && config.find(old_key) != nullptr && *config.find(old_key) != *config.find(new_key)) {
    config.refuse(old_key, "the same as layer_types");
  }
  const std::string& key = has_new ? new_key : old_key;
  const nlohmann::json* types = config.find(key);
  for (int64_t layer = 0; layer < num_hidden_layers; ++layer) {
    const nlohmann::json type =
        types == nullptr                                                                ? "mamba"
        : types->is_array() && static_cast<int64_t>(types->size()) == num_hidden_layers ? (*types)[layer]
                                                                                        : *types;
    const bool is_ssm = type == "mamba" || type == "linear_attention";
    if (!is_ssm && type != "attention" && type != "full_attention") {
      config.refuse(key, fmt::format("\"mamba\" or \"attention\" for each of {} layers", num_hidden_layers));
    }
    if (is_ssm) result->layers[layer].mixer = mixer;
  }
}

MlpSpec read_mlp(const ConfigReader& config, int64_t intermediate_size) {
  const int64_t shared = config.positive_integer("shared_intermediate_size", kMostIntermediate, 1024);
  const int64_t num_experts = config.integer_from_0("num_local_experts", kMostExperts, 8);
  const std::string shared_name = "shared_mlp";
  const MlpNames names{.gate = "input_linear", .up = "", .down = "output_linear"};
  if (num_experts == 0) return DenseMlpSpec{.intermediate_size = shared, .names = names, .name = shared_name};
  // A softmax over the chosen experts equals the softmax over all experts divided by the sum over the chosen
  // ones.
  return MoeSpec{.num_experts = num_experts,
                 .num_experts_per_tok = config.positive_integer("num_experts_per_tok", num_experts, 2),
                 .moe_intermediate_size = intermediate_size,
                 .norm_topk_prob = true,
                 .shared_intermediate_size = shared,
                 .names = names,
                 .router_name = "block_sparse_moe.router.layer",
                 .experts_name = "block_sparse_moe.experts",
                 .shared_name = shared_name};
}

void read_granitemoehybrid(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  AttentionSpec attention = common.attention;
  read_biases(config, &attention);
  if (config.boolean("use_sliding_window", false)) config.refuse("use_sliding_window", "false");
  if (config.find("sliding_window") != nullptr) config.refuse("sliding_window", "null");
  config.require_text("normalization_function", "rmsnorm");
  attention.rotary = config.text(kPositions) == "rope";
  read_multipliers(config, &attention, result);
  result->layers.assign(result->layers.size(), {attention, read_mlp(config, common.mlp.intermediate_size)});
  SsmSpec ssm = read_ssm_keys(config, kGraniteMoeHybridSizes, result->hidden_size);
  ssm.name = "mamba";
  set_ssm_layers(config, ssm, result);
}

void read_granite_rope(const ConfigReader& config, DecoderConfig* result) {
  const std::string type = config.text(kPositions);
  if (type == "rope") {
    read_rope(config, result);
  } else if (!type.empty() && type != "nope" && type != "none") {
    config.refuse(kPositions, "\"rope\", \"nope\" or null");
  }
}

}  // namespace

constexpr ModelFamily kGraniteFamily{
    .model_type = "granite",
    .max_position_embeddings = 2048,
    .keys = "attention_multiplier embedding_multiplier logits_scaling residual_multiplier",
    .bias_keys = "self_attn.=attention_bias mlp.=mlp_bias",
    .read = read_granite,
};

constexpr ModelFamily kGraniteMoeHybridFamily{
    .model_type = "granitemoehybrid",
    .max_position_embeddings = 2048,
    // mamba_chunk_size does not affect results; init_method concerns the original training.
    .keys =
        "attention_multiplier embedding_multiplier init_method layers_block_type logits_scaling "
        "mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand "
        "mamba_n_groups mamba_n_heads mamba_proj_bias normalization_function num_experts_per_tok "
        "num_local_experts position_embedding_type residual_multiplier router_aux_loss_coef "
        "shared_intermediate_size time_step_limit",
    .bias_keys = "self_attn.=attention_bias mamba.conv1d.=mamba_conv_bias mamba.=mamba_proj_bias",
    .read = read_granitemoehybrid,
    .read_rope = read_granite_rope,
};

}  // namespace espalier
