// SPDX-License-Identifier: Apache-2.0
// The arguments of ssm_scan, as the dispatcher hands them on.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace espalier::detail {

struct SsmArguments {
  const at::Tensor &x, &dt, &a, &b, &c;
  const std::optional<at::Tensor>& d;
  const at::Tensor& prev;
  const std::optional<at::Tensor>& states;
  const at::Tensor& ends;
  int64_t chunk_size;
};

/// Ranks, shapes, dtypes and devices; not the values of prev and ends.
void check_ssm_scan(const SsmArguments& given);

}  // namespace espalier::detail
