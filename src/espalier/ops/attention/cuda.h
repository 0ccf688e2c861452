// SPDX-License-Identifier: Apache-2.0
// Which implementation of tree_attention runs on CUDA.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace espalier {

enum class AttentionKind {
  kAmpere,  // kernels of our own (attention/fused.h)
  kHopper,  // the same, with the instructions of Hopper
  kVarlen,  // mask blocks through ATen's flash attention (attention/varlen.h)
  kMasked,  // chunks of queries with a mask (attention/masked.h)
};

/// The implementation for inputs of `dtype` with heads of `head_dim`: the one that the environment variable
/// ESPALIER_ATTENTION (ampere, hopper, varlen or masked) asks for, otherwise the first of ampere, varlen and
/// masked that supports them. Throws c10::Error where the variable names no implementation, or one that does
/// not support them.
AttentionKind attention_kind(at::ScalarType dtype, int64_t head_dim);

}  // namespace espalier
