// SPDX-License-Identifier: Apache-2.0
// What families with experts have in common.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// The number of experts by the family's own key, or by num_local_experts, the name that Transformers 5 has
/// for it in every family; then num_experts_per_tok, moe_intermediate_size and norm_topk_prob.
MoeSpec read_experts(const ConfigReader& config, const std::string& count_key, bool norm_topk_prob);

/// Adds the MLP that every token passes: shared_expert_intermediate_size, with a gate.
void read_shared_expert(const ConfigReader& config, MoeSpec* moe);

/// Layers with experts by decoder_sparse_step and mlp_only_layers, ascending.
std::vector<int64_t> read_sparse_layers(const ConfigReader& config, int64_t num_hidden_layers);

}  // namespace espalier
