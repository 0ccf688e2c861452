// SPDX-License-Identifier: Apache-2.0
// Experts fused into one tensor per layer: as in memory in Transformers 5, mlp.experts.gate_up_proj [E, 2 I,
// C] and mlp.experts.down_proj [E, C, I], or, always in files of granitemoehybrid,
// block_sparse_moe.input_linear.weight and block_sparse_moe.output_linear.weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "espalier/base/safetensors.h"

namespace espalier {

/// The location of a parameter of one expert in a fused tensor.
struct FusedPlace {
  std::string name;  // of the fused tensor
  int64_t expert;    // index in the first dimension
  int64_t part;      // index among the `parts` equal parts of the second dimension
  int64_t parts;
  bool always;  // whether files never have the separate parameter
};

/// The place of a parameter such as "LAYER.mlp.experts.3.up_proj.weight"; nullopt if it does not belong to a
/// single expert.
std::optional<FusedPlace> fused_place(const std::string& parameter);

/// The values at `place` of `fused`, under the parameter's name. Throws InputError naming `where` if the
/// shape does not fit.
TensorView part_of(const TensorView& fused, const FusedPlace& place, const std::string& parameter,
                   const std::string& where);

/// The fused tensor `name`, from the values of separate parameters by name.
at::Tensor fuse_experts(const std::string& name, const std::map<std::string, at::Tensor>& values);

}  // namespace espalier
