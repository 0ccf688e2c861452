// SPDX-License-Identifier: Apache-2.0
// The rule of `verify` and of the tests, for kernels: in low precision the error against float64 may be at
// most twice that of the plain form in the same dtype, over all values of one kind, where errors below half a
// unit roundoff count as that.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace espalier {

/// Half the distance from 1 to the next number of float32, bfloat16 or float16.
double unit_roundoff_of(at::ScalarType dtype);

/// Errors of one kind of result, pooled over problems.
class PooledErrors {
 public:
  explicit PooledErrors(at::ScalarType dtype) : dtype_(dtype) {}

  /// Of the problem called `name`: all of one shape. Float64 is compared with `exact` alone.
  void add(const std::string& name, const at::Tensor& ours, const at::Tensor& plain, const at::Tensor& exact);

  /// What is wrong, with the problem where it is worst; empty: nothing. Float64 may err by 1e-12 of the exact
  /// result's size.
  std::string fault() const;
  int64_t num_values() const { return num_values_; }

 private:
  at::ScalarType dtype_;
  double ours_ = 0, plain_ = 0, exact_ = 0;  // sums of squares: of errors, and of the exact values
  int64_t num_values_ = 0;
  double worst_ = -1;
  std::string worst_name_{};
};

}  // namespace espalier
