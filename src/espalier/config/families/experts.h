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

/// Adds the shared MLP, mlp.shared_expert with a gate, of shared_expert_intermediate_size.
void read_shared_expert(const ConfigReader& config, MoeSpec* moe);

/// Sets these experts on the layers of `result` that have them by decoder_sparse_step and mlp_only_layers.
void set_sparse_layers(const ConfigReader& config, const MoeSpec& moe, DecoderConfig* result);

}  // namespace espalier
