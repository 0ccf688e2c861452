// SPDX-License-Identifier: Apache-2.0
// The rule of base/error_ratio.h for tensors.
#pragma once

#include <ATen/ATen.h>

#include "espalier/base/error_ratio.h"

namespace espalier {

/// Half the distance from 1 to the next number of float32, bfloat16 or float16.
inline double unit_roundoff(at::ScalarType dtype) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
              "expected float32, bfloat16 or float16, received ", dtype);
  return dtype == at::kFloat ? kFloat32Roundoff : dtype == at::kHalf ? kFloat16Roundoff : kBFloat16Roundoff;
}

}  // namespace espalier
