// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding in a config.json.
#pragma once

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// Reads rope_theta, llama3_rope and rotary_dim of `result`, whose max_position_embeddings and head_dim are
/// set: rope_theta beside rope_scaling (Transformers 4), or rope_parameters (Transformers 5).
/// `partial_rotary_factor` is the family's default, 0 where it rotates whole heads.
void read_rope(const ConfigReader& config, double partial_rotary_factor, DecoderConfig* result);

}  // namespace espalier
