// SPDX-License-Identifier: Apache-2.0
// Matrix products on the CPU by our own panels (kernels/cpu/products/blocked_product.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier::detail {

/// out = a b + bias, or out += a b where `add`, of a [M, K], b [K, N] and, where it is defined, bias [N], all
/// float32 or all bfloat16; with any strides. out [M, N] is float32, or, where nothing is added to it, of the
/// dtype of the operands, rounded once. In all threads where that pays, and bitwise identical for any number
/// of them; a row of the result is the same whatever the other rows are.
void panel_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, const at::Tensor& out,
                   bool add);

/// The right factor b [K, N] of many products, packed once: as large as b, to within padding.
struct PackedFactor {
  at::Tensor words;               // the panels
  at::ScalarType dtype{};         // of b: float32 or bfloat16
  int64_t rows = 0, columns = 0;  // K, N
};
PackedFactor pack_factor(const at::Tensor& b);

/// out = a b + bias as above, of a factor that is packed. All threads take part where b is large, even for
/// one row, since reading b is then most of the work.
void panel_product(const at::Tensor& a, const PackedFactor& b, const at::Tensor& bias, const at::Tensor& out);

}  // namespace espalier::detail
