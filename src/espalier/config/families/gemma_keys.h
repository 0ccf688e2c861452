// SPDX-License-Identifier: Apache-2.0
// What Gemma's families have in common.
#pragma once

#include "espalier/config/families/family.h"

namespace espalier {

/// A layer with biases by attention_bias, norms around 1 and an MLP of gelu, which must be the value of
/// `act_key`; and the factor of the embedding. Refuses attention that is not causal.
LayerSpec read_gemma_layer(const ConfigReader& config, const CommonParts& common, const char* act_key,
                           DecoderConfig* result);

}  // namespace espalier
