// SPDX-License-Identifier: Apache-2.0
// The families of Qwen with Gated DeltaNet layers.
#include <fmt/format.h>

#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"

namespace espalier {
namespace {

/// Sets the mixer on the layers that layer_types or full_attention_interval names.
void set_delta_layers(const ConfigReader& config, const GatedDeltaSpec& mixer, DecoderConfig* result) {
  const nlohmann::json* types = config.find("layer_types");
  const int64_t interval = config.positive_integer("full_attention_interval", kMostLayers, 4);
  for (int64_t layer = 0; layer < result->num_hidden_layers(); ++layer) {
    bool is_linear = (layer + 1) % interval != 0;
    if (types != nullptr) {
      const auto& type =
          types->is_array() && layer < static_cast<int64_t>(types->size()) ? (*types)[layer] : *types;
      is_linear = type == "linear_attention";
      if (!is_linear && type != "full_attention") {
        config.refuse("layer_types", "\"linear_attention\" or \"full_attention\" for each layer");
      }
    }
    if (is_linear) result->layers[layer].mixer = mixer;
  }
  if (types != nullptr && static_cast<int64_t>(types->size()) != result->num_hidden_layers()) {
    config.refuse("layer_types",
                  fmt::format("{} entries, one for each of num_hidden_layers", result->num_hidden_layers()));
  }
}

/// Reads layers of Gated DeltaNet and of gated attention with norms of queries and keys, all with
/// zero-centred norms.
void read_gated_delta_layers(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  LayerSpec layer{.mixer = common.attention, .mlp = common.mlp, .zero_centered_norm = true};
  auto& attention = std::get<AttentionSpec>(layer.mixer);
  read_biases(config, &attention);
  if (config.boolean("use_sliding_window", false)) config.refuse("use_sliding_window", "false");
  if (config.find("sliding_window") != nullptr) config.refuse("sliding_window", "null");
  if (!config.boolean("attn_output_gate", true)) config.refuse("attn_output_gate", "true");
  attention.query_key_norm = attention.output_gate = true;
  result->layers.assign(result->layers.size(), layer);
  GatedDeltaSpec sizes;
  sizes.linear_num_key_heads = config.positive_integer("linear_num_key_heads", kMostHeads, 16);
  sizes.linear_num_value_heads = config.positive_integer("linear_num_value_heads", kMostHeads, 32);
  if (sizes.linear_num_value_heads % sizes.linear_num_key_heads != 0) {
    config.refuse("linear_num_value_heads",
                  fmt::format("a multiple of linear_num_key_heads, {}", sizes.linear_num_key_heads));
  }
  sizes.linear_key_head_dim = config.positive_integer("linear_key_head_dim", kMostHeadDim, 128);
  sizes.linear_value_head_dim = config.positive_integer("linear_value_head_dim", kMostHeadDim, 128);
  sizes.linear_conv_kernel_dim = config.positive_integer("linear_conv_kernel_dim", kMostConvolution, 4);
  set_delta_layers(config, sizes, result);
}

void read_qwen3_next(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  read_gated_delta_layers(config, common, result);
  for (LayerSpec& layer : result->layers) {
    if (auto* delta = std::get_if<GatedDeltaSpec>(&layer.mixer)) delta->fused_projections = true;
  }
  MoeSpec moe = read_experts(config, "num_experts", /*norm_topk_prob=*/true);
  read_shared_expert(config, &moe);
  set_sparse_layers(config, moe, result);
}

void read_qwen3_5_moe(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  read_gated_delta_layers(config, common, result);
  MoeSpec moe = read_experts(config, "num_experts", /*norm_topk_prob=*/true);
  if (!moe.norm_topk_prob) config.refuse("norm_topk_prob", "true");
  read_shared_expert(config, &moe);
  for (LayerSpec& layer : result->layers) layer.mlp = moe;
}

}  // namespace

constexpr ModelFamily kQwen3NextFamily{
    .model_type = "qwen3_next",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 2,
    .head_dim = 256,
    .partial_rotary_factor = 0.25,
    .keys =
        "decoder_sparse_step full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
        "linear_num_key_heads linear_num_value_heads linear_value_head_dim mlp_only_layers "
        "moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_local_experts "
        "router_aux_loss_coef shared_expert_intermediate_size",
    .bias_keys = "self_attn.=attention_bias",
    .read = read_qwen3_next,
};

constexpr ModelFamily kQwen35Family{
    .model_type = "qwen3_5_text",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 4,
    .head_dim = 256,
    .partial_rotary_factor = 0.25,
    .composite_type = "qwen3_5",
    // Keys without effect on the text decoder: the multi-token prediction heads, which checkpoints carry
    // unchanged, and the dtype of states in inference.
    .keys =
        "attn_output_gate full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
        "linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype "
        "mtp_num_hidden_layers mtp_use_dedicated_embeddings",
    .bias_keys = "self_attn.=attention_bias",
    .read = read_gated_delta_layers,
};

constexpr ModelFamily kQwen35MoeFamily{
    .model_type = "qwen3_5_moe_text",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 2,
    .head_dim = 256,
    .partial_rotary_factor = 0.25,
    .composite_type = "qwen3_5_moe",
    .only_experts = true,
    // Keys of multi-token prediction heads and the dtype of states, as in qwen3_5.
    .keys =
        "attn_output_gate full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
        "linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype "
        "moe_intermediate_size mtp_num_hidden_layers mtp_use_dedicated_embeddings norm_topk_prob num_experts "
        "num_experts_per_tok num_local_experts router_aux_loss_coef shared_expert_intermediate_size",
    .bias_keys = "self_attn.=attention_bias",
    .read = read_qwen3_5_moe,
};

}  // namespace espalier
