// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding in a config.json.
#pragma once

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// The scale of queries and keys for a context larger by `factor` (YaRN, equation 22), as in Transformers.
double yarn_scale(double factor, double mscale);

/// Reads the rope of `result`, whose max_position_embeddings is set, from rope_theta and rope_scaling
/// (Transformers 4) or rope_parameters (Transformers 5). Types `default`, `linear`, `llama3` and `yarn`.
void read_rope(const ConfigReader& config, DecoderConfig* result);

/// Likewise with a family's default for files without rope_parameters.
void read_rope_or(const ConfigReader& config, const nlohmann::json& rope_parameters, DecoderConfig* result);

/// Likewise for families whose layers with a sliding window have a separate rope: rope_parameters has an
/// object for each of full_attention and sliding_attention, and rope_scaling applies only to full_attention.
/// Reads rope and sliding_rope, whose defaults of rope_theta these are.
void read_rope_by_layer_type(const ConfigReader& config, double rope_theta, double sliding_theta,
                             DecoderConfig* result);

/// Reads rotary_dim of `attention`, whose head_dim is set, from partial_rotary_factor of the file or its
/// rope. `partial_rotary_factor` is the family's default; 0: it rotates whole heads.
void read_rotary_dim(const ConfigReader& config, double partial_rotary_factor, AttentionSpec* attention);

}  // namespace espalier
