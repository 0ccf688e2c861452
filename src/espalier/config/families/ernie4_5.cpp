// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

void read_ernie4_5(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  refuse_biases(config);
  refuse_sliding_windows(config, result->num_hidden_layers());
  auto [attention, mlp] = common;
  attention.bias = attention.output_bias = mlp.bias = config.boolean("use_bias", false);
  attention.rotary_interleaved = true;
  result->layers.assign(result->layers.size(), {attention, mlp});
}

}  // namespace

constexpr ModelFamily kErnie45Family{
    .model_type = "ernie4_5",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 2,
    .head_dim = 128,
    .rms_norm_eps = 1e-5,
    .rope_theta = 500000,
    .tie_word_embeddings = true,
    .null_head_dim = true,
    .pad_token_id = 0,
    .keys = "use_bias",
    .bias_keys = "self_attn.=use_bias mlp.=use_bias",
    .read = read_ernie4_5,
};

}  // namespace espalier
