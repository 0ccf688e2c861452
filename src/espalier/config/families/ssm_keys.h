// SPDX-License-Identifier: Apache-2.0
// Keys that families with Mamba-2 layers share.
#pragma once

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// A family's keys for the sizes of SsmSpec, and Transformers' defaults. The width of a layer must be
/// `expand` times the hidden size; with "" as its key, it is free.
struct SsmKeys {
  struct Size {
    const char* key;
    int64_t otherwise;
  };
  Size num_heads, head_dim, state_size, n_groups, conv_kernel, expand;
  const char *use_bias, *use_conv_bias;
};

/// Reads the sizes under these keys and time_step_limit. If SsmKeys::head_dim has no default (0), a head_dim
/// that is absent or "auto" follows from the other sizes.
SsmSpec read_ssm_keys(const ConfigReader& config, const SsmKeys& keys, int64_t hidden_size);

/// Reads time_step_min, time_step_max, time_step_floor and rescale_prenorm_residual, whose default this is.
void read_ssm_init(const ConfigReader& config, bool rescale_prenorm_residual, SsmInit* init);

}  // namespace espalier
