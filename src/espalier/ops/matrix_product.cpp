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

// Products of bfloat16 with results in float32 are the library's on CUDA alone.
bool has_wide_results(const at::Tensor& factor) {
  return factor.is_cuda() && factor.scalar_type() == at::kBFloat16;
}

}  // namespace

at::ScalarType product_dtype(const at::Tensor& matrix) {
  return matrix.is_cpu() ? cpu_product_dtype(matrix.scalar_type()) : matrix.scalar_type();
}

at::ScalarType cpu_product_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && cpu_level() < CpuLevel::kAmx ? at::kFloat : dtype;
}

at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b) {
  if (has_wide_results(a)) return at::mm(a, b, at::kFloat);
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
  } else if (has_wide_results(left)) {
    // A summand of one row would be taken for a bias, by another path of the library.
    if (sum.size(0) == 1) {
      sum.add_(wide_product(left, right));
      return;
    }
    at::Tensor out = sum;  // one tensor as summand and result: nothing is copied
    at::addmm_out(out, out, left, right, at::kFloat);
  } else {
    sum.add_(left.mm(right));
  }
}

}  // namespace espalier::detail
