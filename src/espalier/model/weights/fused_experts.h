// SPDX-License-Identifier: Apache-2.0
// Experts that are one tensor per layer in a file: as Transformers 5 has them in memory,
// mlp.experts.gate_up_proj [E, 2 I, C] and mlp.experts.down_proj [E, C, I], or as files of granitemoehybrid
// always have them, block_sparse_moe.input_linear.weight and block_sparse_moe.output_linear.weight likewise.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "espalier/base/safetensors.h"

namespace espalier {

/// Where a parameter of one expert is in a tensor of all experts.
struct FusedPlace {
  std::string name;  // of that tensor
  int64_t expert;    // the first index
  int64_t part;      // of the second dimension, which has `parts` equal ones
  int64_t parts;
  bool always;  // files never have the parameter by itself
};

/// The place of, for instance, "LAYER.mlp.experts.3.up_proj.weight"; nullopt for parameters of no single
/// expert.
std::optional<FusedPlace> fused_place(const std::string& parameter);

/// The values at `place` of `fused`, under the parameter's name. Throws InputError naming `where` if they are
/// not there.
TensorView part_of(const TensorView& fused, const FusedPlace& place, const std::string& parameter,
                   const std::string& where);

/// The tensor `name` of all experts, from the values of their parameters by name.
at::Tensor fuse_experts(const std::string& name, const std::map<std::string, at::Tensor>& values);

}  // namespace espalier
