// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding in a config.json.
#pragma once

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// Reads rope_theta and llama3_rope of `result`, whose max_position_embeddings is set: rope_theta beside
/// rope_scaling (Transformers 4), or rope_parameters (Transformers 5).
void read_rope(const ConfigReader& config, DecoderConfig* result);

}  // namespace espalier
