// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "espalier/config/families/family.h"
#include "espalier/config/families/gated_delta_keys.h"

namespace espalier {

namespace {

// Keys without effect on the text decoder: the multi-token prediction heads, which checkpoints carry
// unchanged, and the dtype of states in inference.
constexpr auto kQwen35Keys = std::to_array<std::string_view>(
    {"attn_output_gate", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
     "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "mamba_ssm_dtype",
     "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"});

}  // namespace

constexpr ModelFamily kQwen35Family{
    .model_type = "qwen3_5_text",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 4,
    .head_dim = 256,
    .partial_rotary_factor = 0.25,
    .composite_type = "qwen3_5",
    .keys = kQwen35Keys,
    .read = read_gated_delta_layers,
};

}  // namespace espalier
