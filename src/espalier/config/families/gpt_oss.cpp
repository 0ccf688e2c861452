// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

MoeSpec read_moe(const ConfigReader& config) {
  MoeSpec moe;
  moe.num_experts = config.positive_integer("num_local_experts", kMostExperts);
  moe.num_experts_per_tok = config.positive_integer("num_experts_per_tok", moe.num_experts);
  // The file of the first release has it under both names.
  if (config.positive_integer("experts_per_token", moe.num_experts, moe.num_experts_per_tok) !=
      moe.num_experts_per_tok) {
    config.refuse("experts_per_token", fmt::format("num_experts_per_tok, {}", moe.num_experts_per_tok));
  }
  moe.moe_intermediate_size = config.positive_integer("intermediate_size", kMostIntermediate);
  moe.scores = RouterScores::kSoftmaxOverChosen;
  moe.clamped_swiglu = {.swiglu_alpha = config.positive_number("swiglu_alpha", 1.702),
                        .swiglu_limit = config.positive_number("swiglu_limit", 7.0)};
  moe.router_name = "mlp.router";
  return moe;
}

// Without layer_types, every second layer has the window, beginning with the first.
void read_gpt_oss(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  if (config.find("quantization_config") != nullptr) {
    config.refuse("quantization_config",
                  "weights that are not quantised (of an MXFP4 model, save a copy in bfloat16 with "
                  "Transformers: from_pretrained(MODEL, dtype=\"bfloat16\", "
                  "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(COPY))");
  }
  for (const char* key : {"mlp_bias", "use_sliding_window"}) {
    if (config.find(key) != nullptr) config.refuse(key, "no such key in gpt_oss");
  }
  AttentionSpec attention = common.attention;
  attention.bias = attention.output_bias = config.boolean("attention_bias", true);
  attention.sinks = true;
  result->layers.assign(result->layers.size(), {attention, read_moe(config)});
  std::vector<bool> sliding(result->num_hidden_layers());
  for (int64_t i = 0; i < result->num_hidden_layers(); i += 2) sliding[i] = true;
  set_sliding_layers(config, read_layer_types(config, result->num_hidden_layers()).value_or(sliding), result,
                     /*default_window=*/128);
}

void read_own_rope(const ConfigReader& config, DecoderConfig* result) {
  const nlohmann::json otherwise = {{"rope_type", "yarn"}, {"factor", 32.0},
                                    {"beta_fast", 32.0},   {"beta_slow", 1.0},
                                    {"truncate", false},   {"original_max_position_embeddings", 4096}};
  read_rope_or(config, otherwise, result);
}

}  // namespace

constexpr ModelFamily kGptOssFamily{
    .model_type = "gpt_oss",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 8,
    .head_dim = 64,
    .rms_norm_eps = 1e-5,
    .rope_theta = 150000,
    .only_experts = true,
    // initial_context_length repeats the rope's original_max_position_embeddings.
    .keys =
        "experts_per_token initial_context_length num_experts_per_tok num_local_experts router_aux_loss_coef "
        "swiglu_alpha swiglu_limit",
    .bias_keys = "self_attn.=attention_bias",
    .read = read_gpt_oss,
    .read_rope = read_own_rope,
};

}  // namespace espalier
