// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding in a config.json.
#pragma once

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// Reads the rope of `result`, whose max_position_embeddings is set: rope_theta beside rope_scaling
/// (Transformers 4), or rope_parameters (Transformers 5). Types `default`, `linear`, `llama3` and `yarn`.
void read_rope(const ConfigReader& config, DecoderConfig* result);

/// The same of families with another default: `rope_parameters` where the file has no such key, and
/// `rope_theta` where it has none.
void read_rope_or(const ConfigReader& config, const nlohmann::json& rope_parameters, double rope_theta,
                  DecoderConfig* result);

/// The same of families whose layers with a sliding window have a rope of their own (olmo3): rope_parameters
/// has an object for each of full_attention and sliding_attention, and rope_scaling is that of full_attention
/// alone. Reads rope and sliding_rope. rope_theta is 500000 where it is not given.
void read_rope_by_layer_type(const ConfigReader& config, DecoderConfig* result);

/// Reads rotary_dim of `attention`, whose head_dim is set: partial_rotary_factor of the file or of its rope.
/// `partial_rotary_factor` is the family's default, 0 where it rotates whole heads.
void read_rotary_dim(const ConfigReader& config, double partial_rotary_factor, AttentionSpec* attention);

}  // namespace espalier
