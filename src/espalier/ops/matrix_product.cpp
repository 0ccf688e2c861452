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
  return matrix.is_cpu() ? cpu_product_dtype(matrix.scalar_type()) : matrix.scalar_type();
}

at::ScalarType cpu_product_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && cpu_level() < CpuLevel::kAmx ? at::kFloat : dtype;
}

at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b) {
  return operand(a).mm(operand(b)).to(accumulator_dtype(a.scalar_type()));
}

at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor left = operand(x), right = operand(weight).t();
  return (bias.defined() ? at::addmm(operand(bias), left, right) : left.mm(right)).to(x.scalar_type());
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
