// SPDX-License-Identifier: Apache-2.0
// Keys that families with experts share.
#pragma once

#include <string>

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// Reads the number of experts from the family's key or num_local_experts, Transformers 5's name for it in
/// every family; then num_experts_per_tok, moe_intermediate_size and norm_topk_prob.
MoeSpec read_experts(const ConfigReader& config, const std::string& count_key, bool norm_topk_prob);

/// Transformers' defaults for keys of these names.
struct GroupedExperts {
  int64_t n_group = 1, topk_group = 1;
  double routed_scaling_factor = 1;
  int64_t first_k_dense_replace = 1;
};

/// The experts of DeepSeek-V3 and those like them: read_experts with n_routed_experts, scores by sigmoid with
/// a correction bias, routed_scaling_factor, and groups.
MoeSpec read_grouped_experts(const ConfigReader& config, const GroupedExperts& defaults = {});

/// Sets these experts, with n_shared_experts, on the layers of `result` from first_k_dense_replace on; and
/// reads the number of layers for multi-token prediction.
void set_grouped_experts(const ConfigReader& config, const GroupedExperts& defaults, DecoderConfig* result);

/// Adds the shared MLP, mlp.shared_expert with a gate, of shared_expert_intermediate_size.
void read_shared_expert(const ConfigReader& config, MoeSpec* moe);

/// Sets these experts on the layers of `result` that have them by decoder_sparse_step and mlp_only_layers.
void set_sparse_layers(const ConfigReader& config, const MoeSpec& moe, DecoderConfig* result);

}  // namespace espalier
