// SPDX-License-Identifier: Apache-2.0
// The choice of the tree_attention implementation on CUDA.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace espalier {

enum class AttentionKind {
  kAmpere,  // our own kernels (attention/fused.h)
  kHopper,  // our own kernels with Hopper instructions
  kVarlen,  // mask blocks through ATen's flash attention (attention/varlen.h)
  kMasked,  // chunks of queries with a mask (attention/masked.h)
};

/// The properties of inputs that the choice depends on.
struct AttentionInputKind {
  at::ScalarType dtype;
  int64_t head_dim;
  bool sliding_window = false;  // supported only by kMasked
  bool sinks = false;           // forward pass only: supported by kVarlen and kMasked
};

/// The implementation for such inputs: the one named by the environment variable ESPALIER_ATTENTION (ampere,
/// hopper, varlen or masked), otherwise the first proven one that supports them (attention/proven.h; among
/// ampere, varlen and masked if none is set). Throws c10::Error if the variable is invalid or names one that
/// does not support them.
AttentionKind attention_kind(const AttentionInputKind& inputs);

}  // namespace espalier
