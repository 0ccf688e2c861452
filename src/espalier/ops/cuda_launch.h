// SPDX-License-Identifier: Apache-2.0
// Device and stream of kernel launches, through LibTorch's device-generic API, which exists in builds without
// CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace espalier::detail {

/// Makes the tensor's device current during its lifetime.
class LaunchPlace {
 public:
  explicit LaunchPlace(const at::Tensor& tensor)
      : guard_(tensor.device()),
        stream_(
            c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).native_handle()) {}

  /// The current stream of the device (cudaStream_t).
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  void* stream_;
};

}  // namespace espalier::detail
