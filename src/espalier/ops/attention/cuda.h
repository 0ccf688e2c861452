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

/// What the choice goes by.
struct AttentionInputKind {
  at::ScalarType dtype;
  int64_t head_dim;
  bool sliding_window = false;  // served by kMasked alone
  bool sinks = false;           // of a forward pass: served by kVarlen and kMasked
};

/// The implementation for such inputs: the one that the environment variable
/// ESPALIER_ATTENTION (ampere, hopper, varlen or masked) asks for, otherwise the first that supports them of
/// those that have proven themselves (attention/proven.h; of ampere, varlen and masked where nothing has).
/// Throws c10::Error where the variable names no implementation, or one that does not support them.
AttentionKind attention_kind(const AttentionInputKind& inputs);

}  // namespace espalier
