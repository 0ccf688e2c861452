// SPDX-License-Identifier: Apache-2.0
// Keys that the Qwen families with Gated DeltaNet layers share.
#pragma once

#include "espalier/config/families/family.h"

namespace espalier {

/// Reads layers of Gated DeltaNet and of gated attention with norms of queries and keys, all with
/// zero-centred norms.
void read_gated_delta_layers(const ConfigReader& config, const CommonParts& common, DecoderConfig* result);

}  // namespace espalier
