// SPDX-License-Identifier: Apache-2.0
// Which implementation of tree_attention runs on CUDA.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "espalier/ops/kernel_choice.h"

namespace espalier {

/// What the choice goes by.
struct AttentionInputKind {
  at::ScalarType dtype;
  int64_t head_dim;
  bool sliding_window = false;  // served by kMasked alone
  bool sinks = false;           // of a forward pass: served by kVarlen and kMasked
};

/// The implementation for such inputs, of cuda_kernels(). Throws c10::Error where one is named that does not
/// serve them.
AttentionKind attention_kind(const AttentionInputKind& inputs);

}  // namespace espalier
