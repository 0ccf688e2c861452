// SPDX-License-Identifier: Apache-2.0
// Which implementation of tree_attention runs on CUDA.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace espalier {

enum class AttentionKind {
  kAmpere,  // kernels of our own (tree_attention_fused.h)
  kHopper,  // likewise
  kVarlen,  // mask blocks through ATen's flash attention (attention/varlen.h)
  kMasked,  // chunks of queries with a mask (tree_attention_masked.h)
};

/// The implementation for inputs of `dtype` with heads of `head_dim`: the one that the environment variable
/// ESPALIER_ATTENTION (ampere, hopper, varlen or masked) asks for, otherwise the first of ampere, varlen and
/// masked that serves them. Throws c10::Error where the variable names none, or one that does not serve them.
AttentionKind attention_kind(at::ScalarType dtype, int64_t head_dim);

}  // namespace espalier
