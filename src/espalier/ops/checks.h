// SPDX-License-Identifier: Apache-2.0
// Checks of operator arguments. Each throws with prefix `op` if the argument `name` is invalid.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier::detail {

/// The dtype of sums: float64 for float64, otherwise float32.
at::ScalarType accumulator_dtype(at::ScalarType dtype);

void check_float(const char* op, const char* name, const at::Tensor& tensor);  // float64, float32 or bfloat16
void check_rank(const char* op, const char* name, const at::Tensor& tensor, int64_t rank);
void check_alike(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& first);
void check_limit(const char* op, double limit);

/// Expected properties of an argument; `shape` is its symbolic form for messages.
struct ExpectedTensor {
  const char* shape;
  c10::SymIntArrayRef sizes;
  at::TensorOptions options;  // dtype and device
};
void check_tensor(const char* op, const char* name, const at::Tensor& tensor, const ExpectedTensor& expected);

/// The same for a tensor that may be undefined.
void check_if_defined(const char* op, const char* name, const at::Tensor& tensor,
                      const ExpectedTensor& expected);

}  // namespace espalier::detail
