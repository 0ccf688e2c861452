// SPDX-License-Identifier: Apache-2.0
// Random problems of edge_logprobs, for comparisons across devices and ways of cutting.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/ops/comparison.h"
#include "tests/test_seed.h"

namespace espalier::testing {

struct EdgeSizes {
  int64_t num_rows;
  int64_t num_edges;
  int64_t hidden_size;
  int64_t vocabulary;
};

/// Rows without an edge, rows with several, and edges that repeat are all likely. On the CPU; floating point
/// in float64, of numbers that `dtype` holds.
struct EdgeProblem {
  at::Tensor hidden, weight, edge_row, edge_target, grad_out;

  EdgeProblem(uint64_t seed, const EdgeSizes& sizes, at::ScalarType dtype = at::kDouble) {
    std::mt19937_64 random(test_seed(seed));
    std::vector<int64_t> rows, targets;
    for (int64_t e = 0; e < sizes.num_edges; ++e) {
      rows.push_back(std::uniform_int_distribution<int64_t>(0, sizes.num_rows - 1)(random));
      targets.push_back(std::uniform_int_distribution<int64_t>(0, sizes.vocabulary - 1)(random));
    }
    std::ranges::sort(rows);
    edge_row = at::tensor(rows, at::kLong);
    edge_target = at::tensor(targets, at::kLong);
    const auto generator = at::detail::createCPUGenerator(test_seed(seed));
    const auto normal = [&](at::IntArrayRef shape, at::ScalarType as) {
      return at::randn(shape, generator, at::TensorOptions(at::kDouble)).to(as).to(at::kDouble);
    };
    hidden = normal({sizes.num_rows, sizes.hidden_size}, dtype);
    weight = normal({sizes.vocabulary, sizes.hidden_size}, dtype);
    grad_out = normal({sizes.num_edges}, dtype == at::kDouble ? at::kDouble : at::kFloat);
  }

  /// Log-probabilities and the gradients of hidden and weight by `logprobs`, on the CPU again.
  template <class LogProbs>
  Results run(const LogProbs& logprobs, at::ScalarType dtype, at::Device device) const {
    const at::Tensor row = edge_row.to(device), target = edge_target.to(device);
    const auto function = [&](const std::vector<at::Tensor>& in) {
      return logprobs(in[0], in[1], row, target);
    };
    const auto grad_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
    Results results;
    for (const at::Tensor& result :
         with_gradients(function, {hidden.to(device, dtype), weight.to(device, dtype)},
                        grad_out.to(device, grad_dtype))) {
      results.push_back(result.cpu());
    }
    return results;
  }
};

/// Logits of +-10,000 and a little, which float32 holds exactly: what is wrong comes from softmax alone.
inline EdgeProblem extreme_edge_problem(uint64_t seed, const EdgeSizes& sizes, at::ScalarType dtype) {
  EdgeProblem given(seed, sizes);
  given.hidden.mul_(8).round_().div_(8);
  given.weight.mul_(8).round_().div_(8);
  given.hidden.select(1, 0).sign_().mul_(100);
  given.weight.select(1, 0).fill_(100);
  for (at::Tensor* input : {&given.hidden, &given.weight}) *input = input->to(dtype).to(at::kDouble);
  given.grad_out = given.grad_out.to(at::kFloat).to(at::kDouble);
  return given;
}

}  // namespace espalier::testing
