// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gemm/matrix_product.h"

#include <ATen/ATen.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/gemm/panel_product.h"

namespace espalier::detail {
namespace {

// Keeps the strides: a transposed matrix stays one for the BLAS.
at::Tensor operand(const at::Tensor& matrix) {
  return matrix.to(product_dtype(matrix));
}

// Products of bfloat16 with results in float32 are the library's on CUDA alone.
bool has_wide_results(const at::Tensor& factor) {
  return factor.is_cuda() && factor.scalar_type() == at::kBFloat16;
}

}  // namespace

at::ScalarType product_dtype(const at::Tensor& matrix) {
  return matrix.is_cpu() ? cpu_product_dtype(matrix.scalar_type()) : matrix.scalar_type();
}

at::ScalarType cpu_product_dtype(at::ScalarType dtype) {
  const bool upcast = dtype == at::kBFloat16 && product_choice().bfloat16 == Bfloat16Products::kUpcast;
  return upcast ? at::kFloat : dtype;
}

bool rounds_products(const at::Tensor& matrix) {
  return matrix.is_cpu() && matrix.scalar_type() == at::kBFloat16 &&
         product_choice().bfloat16 == Bfloat16Products::kLibrary;
}

bool uses_panels(const at::Tensor& matrix) {
  return matrix.is_cpu() && cpu_uses_panels(matrix.scalar_type());
}

bool cpu_uses_panels(at::ScalarType dtype) {
  if (dtype == at::kDouble) return false;
  const ProductChoice choice = product_choice();
  return dtype == at::kFloat ? choice.float32 == Float32Products::kPanels
                             : choice.bfloat16 == Bfloat16Products::kNative;
}

at::Tensor unrounded_product(const at::Tensor& a, const at::Tensor& b) {
  if (has_wide_results(a)) return at::mm(a, b, at::kFloat);
  const at::Tensor left = operand(a), right = operand(b);
  if (!uses_panels(left)) return left.mm(right).to(accumulator_dtype(a.scalar_type()));
  const at::Tensor product = at::empty({a.size(0), b.size(1)}, a.options().dtype(at::kFloat));
  panel_product(left, right, {}, product, /*add=*/false);
  return product;
}

at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor left = operand(x), right = operand(weight).t();
  const at::Tensor summand = bias.defined() ? operand(bias) : bias;
  if (!uses_panels(left)) {
    return (bias.defined() ? at::addmm(summand, left, right) : left.mm(right)).to(x.scalar_type());
  }
  const at::Tensor product = at::empty({x.size(0), weight.size(0)}, left.options());
  panel_product(left, right, summand, product, /*add=*/false);
  return product.to(x.scalar_type());
}

void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor left = operand(a), right = operand(b);
  if (uses_panels(left)) {
    panel_product(left, right, {}, sum, /*add=*/true);
  } else if (sum.scalar_type() == left.scalar_type()) {
    sum.addmm_(left, right);
  } else if (has_wide_results(left)) {
    // A summand of one row would be taken for a bias, by another path of the library.
    if (sum.size(0) == 1) {
      sum.add_(unrounded_product(left, right));
      return;
    }
    at::Tensor out = sum;  // one tensor as summand and result: nothing is copied
    at::addmm_out(out, out, left, right, at::kFloat);
  } else {
    sum.add_(left.mm(right));
  }
}

}  // namespace espalier::detail
