// SPDX-License-Identifier: Apache-2.0
// Output tensors with guard bytes, to detect kernels that write out of bounds.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

/// While an instance exists, output_like in this thread adds guards before and after its allocations, which
/// are kept alive. At most one instance per thread.
class OutputGuards {
 public:
  OutputGuards();
  ~OutputGuards();
  OutputGuards(const OutputGuards&) = delete;
  OutputGuards& operator=(const OutputGuards&) = delete;

  /// The number of outputs with damaged guards so far. Synchronises the device.
  int64_t broken() const;
  int64_t size() const;
};

/// Whether OutputGuards are active in this thread.
bool outputs_have_guards();

/// An output tensor for a kernel: contiguous, uninitialised or with `zeroed` zero-filled. Its storage offset
/// is 0 unless OutputGuards are active.
at::Tensor output_like(at::IntArrayRef sizes, const at::TensorOptions& options, bool zeroed = false);

}  // namespace espalier
