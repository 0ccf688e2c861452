// SPDX-License-Identifier: Apache-2.0
// What families with experts have in common.
#pragma once

#include <string>

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// The number of experts by the family's own key, or by num_local_experts, the name that Transformers 5 has
/// for it in every family; then num_experts_per_tok, moe_intermediate_size and norm_topk_prob.
MoeSpec read_experts(const ConfigReader& config, const std::string& count_key, bool norm_topk_prob);

/// Adds the MLP that every token passes: shared_expert_intermediate_size, with a gate, named
/// mlp.shared_expert.
void read_shared_expert(const ConfigReader& config, MoeSpec* moe);

/// Gives these experts to the layers of `result` that have some by decoder_sparse_step and mlp_only_layers.
void set_sparse_layers(const ConfigReader& config, const MoeSpec& moe, DecoderConfig* result);

}  // namespace espalier
