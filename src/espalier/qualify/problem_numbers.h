// SPDX-License-Identifier: Apache-2.0
// Random inputs of operator checks, and gradients by autograd.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "espalier/ops/checks.h"
#include "espalier/qualify/operator_family.h"

namespace espalier::qualify {

/// Seeded random numbers that are exact in a dtype.
class ProblemNumbers {
 public:
  ProblemNumbers(uint64_t seed, at::ScalarType dtype)
      : generator_(at::detail::createCPUGenerator(seed)), dtype_(dtype) {}

  /// Normally distributed.
  OperatorInput elements(at::IntArrayRef shape, double size = 1) {
    return {held(normal(shape) * size, dtype_), OperatorInput::Kind::kElement};
  }
  OperatorInput sums(at::IntArrayRef shape) { return as_sums(normal(shape)); }
  /// Uniform in [low, low + 1).
  OperatorInput sums_from(double low, at::IntArrayRef shape) {
    return as_sums(at::rand(shape, generator_, at::TensorOptions(at::kDouble)) + low);
  }
  OperatorInput as_sums(const at::Tensor& values) const {
    return {held(values, detail::accumulator_dtype(dtype_)), OperatorInput::Kind::kSum};
  }
  /// Integers from 0 to below - 1.
  at::Tensor indices(int64_t count, int64_t below) {
    return at::randint(below, {count}, generator_, at::TensorOptions(at::kLong));
  }
  at::Tensor normal(at::IntArrayRef shape) {
    return at::randn(shape, generator_, at::TensorOptions(at::kDouble));
  }

 private:
  static at::Tensor held(const at::Tensor& values, at::ScalarType dtype) {
    return values.to(dtype).to(at::kDouble);
  }

  at::Generator generator_;
  at::ScalarType dtype_;
};

/// Returns the results of function(leaves) and the gradients of the leaves.
template <class Function>
std::vector<at::Tensor> with_autograd(const Function& function, std::vector<at::Tensor> leaves,
                                      const std::vector<at::Tensor>& grads) {
  const at::AutoGradMode with_grad(true);
  for (at::Tensor& leaf : leaves) leaf = leaf.detach().requires_grad_();
  const std::vector<at::Tensor> outputs = function(leaves);
  std::vector<at::Tensor> results;
  for (const at::Tensor& output : outputs) results.push_back(output.detach());
  for (const at::Tensor& gradient : torch::autograd::grad(outputs, leaves, grads))
    results.push_back(gradient);
  return results;
}

}  // namespace espalier::qualify
