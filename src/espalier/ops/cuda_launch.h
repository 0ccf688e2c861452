// SPDX-License-Identifier: Apache-2.0
// Device and stream of kernel launches, through LibTorch's device-generic API, which exists in builds without
// CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "espalier/base/check.h"

namespace espalier::detail {

/// The handle of a stream, which PyTorch 2.9 does not give. A template, so that only the branch that exists
/// is compiled.
template <class Stream>
void* handle_of(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    throw InputError("CUDA kernels: expected PyTorch 2.11 or later, received an older one");
  }
}

/// The current stream of a CUDA device (cudaStream_t).
inline void* current_stream(const at::Device& device) {
  return handle_of(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

/// Makes the tensor's device current during its lifetime.
class LaunchPlace {
 public:
  explicit LaunchPlace(const at::Tensor& tensor)
      : guard_(tensor.device()), stream_(current_stream(tensor.device())) {}

  /// The current stream of the device (cudaStream_t).
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  void* stream_;
};

}  // namespace espalier::detail
