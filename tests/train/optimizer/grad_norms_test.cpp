// SPDX-License-Identifier: Apache-2.0
// Gradient norms by kind of module.
#include "espalier/train/optimizer/diagnosis.h"

#include <gtest/gtest.h>

#include <cmath>

namespace espalier {
namespace {

TEST(GradNorms, KindsOfEveryFamilysParameters) {
  const std::vector<std::pair<const char*, const char*>> kinds = {
      {"model.embed_tokens.weight", "embed_tokens"},
      {"model.norm.weight", "norm"},
      {"lm_head.weight", "lm_head"},
      {"model.layers.0.input_layernorm.weight", "norm"},
      {"model.layers.12.self_attn.q_proj.weight", "self_attn"},
      {"model.layers.12.self_attn.q_norm.weight", "self_attn"},
      {"model.layers.3.mlp.gate_proj.weight", "mlp"},
      {"model.layers.3.mlp.gate.weight", "router"},
      {"model.layers.3.mlp.router.bias", "router"},
      {"model.layers.3.mlp.gate.e_score_correction_bias", "router"},
      {"model.layers.3.mlp.experts.7.up_proj.weight", "experts"},
      {"model.layers.3.mlp.experts.gate_up_proj", "experts"},
      {"model.layers.3.mlp.shared_expert.down_proj.weight", "mlp"},
      {"model.layers.3.block_sparse_moe.input_linear.weight", "experts"},
      {"model.layers.3.block_sparse_moe.router.layer.weight", "router"},
      {"model.layers.3.shared_mlp.output_linear.weight", "shared_mlp"},
      {"model.layers.3.mamba.A_log", "mamba"},
      {"model.layers.3.linear_attn.norm.weight", "linear_attn"},
      {"backbone.embeddings.weight", "embeddings"},
      {"backbone.layers.1.mixer.in_proj.weight", "mixer"},
      {"backbone.layers.1.norm.weight", "norm"},
      {"backbone.norm_f.weight", "norm"},
      {"model.language_model.layers.0.mlp.up_proj.weight", "mlp"},
      {"base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight", "self_attn"},
      {"weight", "weight"},
  };
  for (const auto& [parameter, kind] : kinds) EXPECT_EQ(module_kind(parameter), kind) << parameter;
}

}  // namespace
}  // namespace espalier
