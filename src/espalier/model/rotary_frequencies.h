// SPDX-License-Identifier: Apache-2.0
// Angles of rotary position embeddings.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "espalier/config/config.h"

namespace espalier {

/// A rope of the rotated part of heads, of `rotary_dim` elements. Everything is computed in float32 and in
/// the order of operations of Transformers (modeling_rope_utils), so that the tables agree to the last bit.
struct RotaryFrequencies {
  at::Tensor inverse;           // [rotary_dim / 2] float32: angle per position of each rotated pair
  double attention_factor = 1;  // of cos and sin

  RotaryFrequencies() = default;
  RotaryFrequencies(const Rope& rope, int64_t rotary_dim);
};

}  // namespace espalier
