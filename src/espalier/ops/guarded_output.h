// SPDX-License-Identifier: Apache-2.0
// Outputs of kernels with guards around them, to find a kernel that writes beyond what it was given.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace espalier {

/// While one lives, output_like of this thread puts guards before and behind what it allocates, and keeps
/// them. One at a time.
class OutputGuards {
 public:
  OutputGuards();
  ~OutputGuards();
  OutputGuards(const OutputGuards&) = delete;
  OutputGuards& operator=(const OutputGuards&) = delete;

  /// How many outputs have been written beyond their ends since the start. Waits for the device.
  int64_t broken() const;
  int64_t size() const;
};

/// Whether they live, in this thread.
bool outputs_have_guards();

/// A tensor for a kernel to write: contiguous, uninitialised, and with `zeroed` full of zeros. Begins at its
/// storage unless OutputGuards live.
at::Tensor output_like(at::IntArrayRef sizes, const at::TensorOptions& options, bool zeroed = false);

}  // namespace espalier
