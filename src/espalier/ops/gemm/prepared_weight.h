// SPDX-License-Identifier: Apache-2.0
// A weight of many products, made ready once.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/ops/gemm/panel_product.h"

namespace espalier::detail {

/// A weight [N, K] in its product_dtype (matrix_product.h), and packed where products are made by our own
/// panels. Takes as much memory again where that is not the weight itself.
class PreparedWeight {
 public:
  explicit PreparedWeight(const at::Tensor& weight);

  /// affine of this weight (matrix_product.h).
  at::Tensor affine(const at::Tensor& x, const at::Tensor& bias) const;

  /// x weight^T [M, N] as unrounded_product has it.
  at::Tensor unrounded(const at::Tensor& x) const;

 private:
  at::Tensor operand_;  // undefined where packed
  PackedFactor packed_;
};

}  // namespace espalier::detail
