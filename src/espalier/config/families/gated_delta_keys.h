// SPDX-License-Identifier: Apache-2.0
// What the families of Qwen with Gated DeltaNet layers have in common.
#pragma once

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// Gated attention with norms of queries and keys, zero-centred norms, and the sizes and places of the
/// Gated DeltaNet layers.
void read_gated_delta_keys(const ConfigReader& config, DecoderConfig* result);

}  // namespace espalier
