// How results of ops are compared with those of their references.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <vector>

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
