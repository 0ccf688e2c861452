// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

namespace espalier::qualify {

/// Whether both are bitwise identical, including NaN and signed zero, with equal shape and dtype.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         a.contiguous().view(at::kByte).equal(b.contiguous().view(at::kByte));
}

}  // namespace espalier::qualify
