// SPDX-License-Identifier: Apache-2.0
// How results of ops are compared with those of their references.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <vector>

#include "espalier/ops/tensor_errors.h"
#include "tests/error_ratio.h"

namespace espalier::testing {

/// A result and its gradients with respect to the differentiable inputs.
using Results = std::vector<at::Tensor>;

/// ||a - b|| / ||b|| in float64 (||a|| where b is 0). Infinite where shapes differ or a is not finite.
inline double relative_error(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  const at::Tensor b64 = b.detach().to(at::kDouble);
  const at::Tensor a64 = a.detach().to(at::kDouble);
  if (!a64.isfinite().all().item<bool>()) return std::numeric_limits<double>::infinity();
  const double difference = (a64 - b64).norm().item<double>();
  const double size = b64.norm().item<double>();
  return size > 0 ? difference / size : difference;
}

/// The largest relative error over results.
inline double worst_error(const Results& a, const Results& b) {
  double worst = a.size() == b.size() ? 0 : std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    worst = std::max(worst, relative_error(a[i], b[i]));
  return worst;
}

/// Of a result in low precision and of the plain form's, in float64. Infinite where one is of another shape
/// than the exact result, or not finite.
inline SquaredErrors squared_errors(const at::Tensor& ours, const at::Tensor& plain,
                                    const at::Tensor& exact) {
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.detach().to(at::TensorOptions(at::kCPU).dtype(at::kDouble));
  };
  const auto squares = [](const at::Tensor& tensor) { return tensor.square().sum().item<double>(); };
  const at::Tensor target = wide(exact);
  const auto error_of = [&](const at::Tensor& result) {
    const double error = result.sizes() == exact.sizes() ? squares(wide(result) - target) : INFINITY;
    return std::isfinite(error) ? error : INFINITY;
  };
  return {error_of(ours), error_of(plain), squares(target), target.numel()};
}

/// Errors of results in low precision, for the rule of tests/error_ratio.h. Results of the same place are
/// pooled over all problems that are added, each in the dtype of ours.
class PooledErrors {
 public:
  PooledErrors() = default;
  PooledErrors(const Results& ours, const Results& plain, const Results& exact) { add(ours, plain, exact); }

  void add(const Results& ours, const Results& plain, const Results& exact) {
    pools_.resize(std::max(pools_.size(), exact.size()));
    for (size_t i = 0; i < exact.size(); ++i) {
      if (i < ours.size()) pools_[i].dtype = ours[i].scalar_type();
      pools_[i].errors += i < ours.size() ? squared_errors(ours[i], plain.at(i), exact[i]) : kMissing;
    }
    if (ours.size() > exact.size()) pools_.at(0).errors += kMissing;
  }

  double worst_ratio() const {
    double worst = 0;
    for (const Pool& pool : pools_) {
      worst = std::max(worst, error_ratio(pool.errors, {unit_roundoff(pool.dtype)}));
    }
    return worst;
  }

  /// Of every result.
  ::testing::AssertionResult at_most_twice_the_plain() const {
    for (size_t i = 0; i < pools_.size(); ++i) {
      auto verdict = at_most_twice_the_plain_error(pools_[i].errors, {unit_roundoff(pools_[i].dtype)});
      if (!verdict) return verdict << ", " << pools_[i].dtype << ", result " << i;
    }
    return pools_.empty() ? ::testing::AssertionFailure() << "no results" : ::testing::AssertionSuccess();
  }

 private:
  struct Pool {
    at::ScalarType dtype = at::kFloat;
    SquaredErrors errors;
  };
  // No such result.
  static constexpr SquaredErrors kMissing{.ours = std::numeric_limits<double>::infinity()};

  std::vector<Pool> pools_;
};

/// function(inputs) and the gradients of <grad_out, function(inputs)> with respect to each input.
template <class Function>
Results with_gradients(const Function& function, const std::vector<at::Tensor>& inputs,
                       const at::Tensor& grad_out) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().requires_grad_());
  const at::Tensor out = function(leaves);
  Results results = torch::autograd::grad({out}, leaves, {grad_out});
  results.insert(results.begin(), out.detach());
  return results;
}

inline std::vector<at::Tensor> cast(const std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.to(dtype));
  return result;
}

/// Equal bit for bit, NaN and signed zero included.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.contiguous().view(at::kByte).equal(b.contiguous().view(at::kByte));
}

}  // namespace espalier::testing
