// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/indices.h"

#include <ATen/ATen.h>

namespace espalier::detail {

at::Tensor to_indices(const std::vector<int64_t>& values, at::Device device) {
  const auto size = static_cast<int64_t>(values.size());
  const at::Tensor host = at::from_blob(const_cast<int64_t*>(values.data()), {size}, at::kLong);
  // Pageable memory is copied before the call returns.
  return device.is_cpu() ? host.clone() : host.to(device, at::kLong, /*non_blocking=*/true);
}

}  // namespace espalier::detail
