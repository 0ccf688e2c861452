// SPDX-License-Identifier: Apache-2.0
// The sizes of a Mamba-2 layer.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace espalier {

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
