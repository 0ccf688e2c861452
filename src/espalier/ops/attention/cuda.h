// SPDX-License-Identifier: Apache-2.0
// The choice of the tree_attention implementation on CUDA.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "espalier/ops/kernel_choice.h"

namespace espalier {

/// The properties of inputs that the choice depends on.
struct AttentionInputKind {
  at::ScalarType dtype;
  int64_t head_dim;             // of keys or values, the larger
  bool sliding_window = false;  // not supported by kAmpere
  bool sinks = false;           // forward pass only: not supported by kAmpere
  int64_t device = 0;           // index of the CUDA device
  bool softcap = false;         // supported by kMasked alone
};

/// The implementation for such inputs, of cuda_kernels(). Throws c10::Error where one is named that does not
/// serve them. `without`: one that has turned out not to serve the forest.
AttentionKind attention_kind(const AttentionInputKind& inputs,
                             std::optional<AttentionKind> without = std::nullopt);

}  // namespace espalier
