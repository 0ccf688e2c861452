// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gemm/prepared_weight.h"

#include <ATen/ATen.h>

#include "espalier/ops/gemm/matrix_product.h"

namespace espalier::detail {

PreparedWeight::PreparedWeight(const at::Tensor& weight) {
  const at::Tensor operand = weight.to(product_dtype(weight));
  if (uses_panels(operand)) {
    packed_ = pack_factor(operand.t());
  } else {
    operand_ = operand;
  }
}

at::Tensor PreparedWeight::affine(const at::Tensor& x, const at::Tensor& bias) const {
  if (operand_.defined()) return detail::affine(x, operand_, bias);
  const at::Tensor left = x.to(packed_.dtype);
  const at::Tensor product = at::empty({x.size(0), packed_.columns}, left.options());
  panel_product(left, packed_, bias.defined() ? bias.to(packed_.dtype) : bias, product);
  return product.to(x.scalar_type());
}

at::Tensor PreparedWeight::unrounded(const at::Tensor& x) const {
  if (operand_.defined()) return unrounded_product(x.to(operand_.scalar_type()), operand_.t());
  const at::Tensor product = at::empty({x.size(0), packed_.columns}, x.options().dtype(at::kFloat));
  panel_product(x.to(packed_.dtype), packed_, {}, product);
  return product;
}

}  // namespace espalier::detail
