// SPDX-License-Identifier: Apache-2.0
// The sizes of recurrent layers: Gated DeltaNet and Mamba-2.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

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

/// A selective state space layer after a short convolution (Dao and Gu, "Transformers are SSMs", 2024). Names
/// as in the config.json of mamba2.
struct SsmSpec {
  int64_t num_heads = 0;  // a multiple of n_groups
  int64_t head_dim = 0;
  int64_t state_size = 0;
  int64_t n_groups = 1;  // of heads that share B and C; the gated norm is over each group separately
  int64_t conv_kernel = 0;
  bool use_bias = false;  // of in_proj and out_proj
  bool use_conv_bias = true;
  double least_time_step = 0;  // time_step_limit
  double most_time_step = std::numeric_limits<double>::infinity();
  std::string name = "mixer";  // of the module in a checkpoint

  int64_t inner_size() const { return num_heads * head_dim; }
  int64_t conv_size() const { return inner_size() + 2 * n_groups * state_size; }      // x, B and C: convolved
  int64_t projection_size() const { return inner_size() + conv_size() + num_heads; }  // gate; x, B, C; dt
  int64_t state_elements() const { return num_heads * state_size * head_dim; }

  bool operator==(const SsmSpec&) const = default;
};

/// Random initialisation of steps and output projections. Names as in the config.json of mamba2.
struct SsmInit {
  double time_step_min = 0.001;
  double time_step_max = 0.1;
  double time_step_floor = 1e-4;
  bool plain = false;  // convolutions are initialised as other maps, and outputs unless they are rescaled
  bool rescale_prenorm_residual = false;
};

}  // namespace espalier
