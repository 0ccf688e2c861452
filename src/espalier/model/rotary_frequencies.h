// SPDX-License-Identifier: Apache-2.0
// Angles of rotary position embeddings.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "espalier/config/config.h"

namespace espalier {

/// Rotary embedding of `rotary_dim` elements of a head. Computed in float32 in the order of operations of
/// Transformers (modeling_rope_utils), so that the tables are bitwise identical.
struct RotaryFrequencies {
  at::Tensor inverse;           // [rotary_dim / 2] float32: angle per position
  double attention_factor = 1;  // scale of cos and sin

  RotaryFrequencies() = default;
  RotaryFrequencies(const Rope& rope, int64_t rotary_dim);
};

}  // namespace espalier
