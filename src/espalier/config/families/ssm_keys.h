// SPDX-License-Identifier: Apache-2.0
// What families with Mamba-2 layers have in common.
#pragma once

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"

namespace espalier {

/// The keys under which a family has the sizes of SsmSpec, and what Transformers takes where they are absent.
/// The width of a layer must be `expand` times the hidden size.
struct SsmKeys {
  struct Size {
    const char* key;
    int64_t otherwise;
  };
  Size num_heads, head_dim, state_size, n_groups, conv_kernel, expand;
  const char *use_bias, *use_conv_bias;
};

/// The sizes under these keys and time_step_limit, for a config whose hidden_size is set. A head_dim that is
/// absent or "auto" follows from the others where SsmKeys::head_dim has no default (0).
SsmSpec read_ssm_keys(const ConfigReader& config, const SsmKeys& keys, int64_t hidden_size);

}  // namespace espalier
