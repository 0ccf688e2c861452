// SPDX-License-Identifier: Apache-2.0
// Matrix products on the CPU by our own panels (kernels/cpu/blocked_product.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier::detail {

/// out = a b + bias, or out += a b where `add`, of a [M, K], b [K, N] and, where it is defined, bias [N], all
/// float32 or all bfloat16; with any strides. out [M, N] is float32, or, where nothing is added to it, of the
/// dtype of the operands, rounded once. In all threads where that pays, and bitwise identical for any number
/// of them; a row of the result is the same whatever the other rows are.
void panel_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, const at::Tensor& out,
                   bool add);

}  // namespace espalier::detail
