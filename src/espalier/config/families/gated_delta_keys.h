// SPDX-License-Identifier: Apache-2.0
// What the families of Qwen with Gated DeltaNet layers have in common.
#pragma once

#include "espalier/config/families/family.h"

namespace espalier {

/// Layers of Gated DeltaNet, and the others, of gated attention with norms of queries and keys; zero-centred
/// norms in all.
void read_gated_delta_layers(const ConfigReader& config, const CommonParts& common, DecoderConfig* result);

}  // namespace espalier
