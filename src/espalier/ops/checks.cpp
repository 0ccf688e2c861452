// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/checks.h"

namespace espalier::detail {

void check_float(const char* op, const char* name, const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16, op, ": ", name,
              " must be float64, float32 or bfloat16, received ", dtype);
}

void check_rank(const char* op, const char* name, const at::Tensor& tensor, int64_t rank) {
  TORCH_CHECK(tensor.dim() == rank, op, ": ", name, " must have ", rank, " dimensions, received shape ",
              tensor.sym_sizes());
}

void check_alike(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& first) {
  TORCH_CHECK(tensor.scalar_type() == first.scalar_type(), op, ": ", name, " must be ", first.scalar_type(),
              " as the first argument is, received ", tensor.scalar_type());
  TORCH_CHECK(tensor.device() == first.device(), op, ": ", name, " must be on ", first.device(),
              ", received ", tensor.device());
}

void check_limit(const char* op, double limit) {
  TORCH_CHECK(limit > 0, op, ": the limit must be above 0, received ", limit);
}

void check_tensor(const char* op, const char* name, const at::Tensor& tensor,
                  const ExpectedTensor& expected) {
  const auto& [shape, sizes, options] = expected;
  TORCH_CHECK(tensor.defined(), op, ": ", name, " must be ", shape, " ", sizes, " ", options.dtype(), " on ",
              options.device(), ", received none");
  TORCH_CHECK(tensor.sym_sizes() == sizes && tensor.scalar_type() == options.dtype() &&
                  tensor.device() == options.device(),
              op, ": ", name, " must be ", shape, " ", sizes, " ", options.dtype(), " on ", options.device(),
              ", received ", tensor.sym_sizes(), " ", tensor.scalar_type(), " on ", tensor.device());
}

void check_if_defined(const char* op, const char* name, const at::Tensor& tensor,
                      const ExpectedTensor& expected) {
  if (tensor.defined()) check_tensor(op, name, tensor, expected);
}

at::ScalarType accumulator_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace espalier::detail
