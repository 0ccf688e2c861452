// SPDX-License-Identifier: Apache-2.0
// Checks of shapes, dtypes and devices for elementwise operators.
#pragma once

#include "espalier/ops/argument.h"

namespace espalier::detail {

/// `other`, if defined, must have the shape of x.
void check_rms_norm(const at::Tensor& x, const at::Tensor& other, const at::Tensor& weight);
void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
void check_swiglu(const at::Tensor& gate, const at::Tensor& up, const char* op = "swiglu");
void check_clamped_swiglu(const at::Tensor& gate_up, double limit);

}  // namespace espalier::detail
