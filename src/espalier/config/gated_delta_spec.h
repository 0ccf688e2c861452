// SPDX-License-Identifier: Apache-2.0
// The sizes of a Gated DeltaNet layer.
#pragma once

#include <cstdint>

namespace espalier {

/// Linear attention with the gated delta rule after a short convolution (Qwen3.5, Qwen3-Next). Names as in
/// config.json.
struct GatedDeltaSpec {
  int64_t linear_num_key_heads = 0;
  int64_t linear_num_value_heads = 0;  // a multiple of the key heads
  int64_t linear_key_head_dim = 0;
  int64_t linear_value_head_dim = 0;
  int64_t linear_conv_kernel_dim = 0;
  // The projections are two matrices, in_proj_qkvz and in_proj_ba, with rows grouped by key head.
  bool fused_projections = false;

  int64_t key_size() const { return linear_num_key_heads * linear_key_head_dim; }
  int64_t value_size() const { return linear_num_value_heads * linear_value_head_dim; }
  int64_t conv_size() const { return 2 * key_size() + value_size(); }  // the convolved part: q, k and v
  int64_t state_size() const { return linear_num_value_heads * linear_key_head_dim * linear_value_head_dim; }

  bool operator==(const GatedDeltaSpec&) const = default;
};

}  // namespace espalier
