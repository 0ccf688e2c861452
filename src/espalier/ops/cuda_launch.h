// SPDX-License-Identifier: Apache-2.0
// Where kernels are launched: the device of a tensor and its current stream, by LibTorch's device-generic
// names, which exist in every build of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace espalier::detail {

/// As long as it lives, the tensor's device is the current one.
class LaunchPlace {
 public:
  explicit LaunchPlace(const at::Tensor& tensor)
      : guard_(tensor.device()),
        stream_(
            c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).native_handle()) {}

  /// The current stream of the device, as launch functions of kernels take it.
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  void* stream_;
};

}  // namespace espalier::detail
