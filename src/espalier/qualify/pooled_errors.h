// SPDX-License-Identifier: Apache-2.0
// What is wrong with the results of kernels, by the rule of base/error_ratio.h.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>

#include <string>

#include "espalier/base/error_ratio.h"

namespace espalier::qualify {

/// Errors of one kind of result, pooled over problems.
class PooledErrors {
 public:
  explicit PooledErrors(at::ScalarType dtype) : dtype_(dtype) {}

  /// Of the problem called `name` ("the forest `chain`"): all of one shape. Float64 is compared with `exact`
  /// alone. An error of less than `floor`, relative to the exact values, counts as that, too.
  void add(const std::string& name, const at::Tensor& ours, const at::Tensor& plain, const at::Tensor& exact,
           double floor = 0);

  /// What is wrong, with the problem where it is worst; empty: nothing. Float64 may err by 1e-12 of the exact
  /// result's size.
  std::string fault() const;
  int64_t num_values() const { return errors_.num_values; }

 private:
  at::ScalarType dtype_;
  SquaredErrors errors_{};
  double floor_ = 0;  // sum of squares of errors that count as none
  double worst_ = -1;
  std::string worst_name_{};
};

/// Whether both are bitwise identical, including NaN and signed zero, with equal shape and dtype.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         a.contiguous().view(at::kByte).equal(b.contiguous().view(at::kByte));
}

}  // namespace espalier::qualify
