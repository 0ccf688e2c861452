#include "espalier/ops/matrix_product.h"

#include <ATen/ATen.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/kernels/cpu_level.h"

namespace espalier::detail {
namespace {

// Keeps the strides: a transposed matrix stays one for the BLAS.
at::Tensor operand(const at::Tensor& matrix) {
  return matrix.to(product_dtype(matrix));
}

}  // namespace

at::ScalarType product_dtype(const at::Tensor& matrix) {
  const bool widen = matrix.is_cpu() && matrix.scalar_type() == at::kBFloat16 && cpu_level() < CpuLevel::kAmx;
  return widen ? at::kFloat : matrix.scalar_type();
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return operand(a).mm(operand(b)).to(a.scalar_type());
}

at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b) {
  return operand(a).mm(operand(b)).to(accumulator_dtype(a.scalar_type()));
}

at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!bias.defined()) return product(x, weight.t());
  return at::addmm(operand(bias), operand(x), operand(weight).t()).to(x.scalar_type());
}

void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor left = operand(a), right = operand(b);
  if (sum.scalar_type() == left.scalar_type()) {
    sum.addmm_(left, right);
  } else {
    sum.add_(left.mm(right));
  }
}

}  // namespace espalier::detail
