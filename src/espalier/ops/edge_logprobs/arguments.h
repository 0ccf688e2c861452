// SPDX-License-Identifier: Apache-2.0
// Shared by implementations of edge_logprobs and edge_distribution share.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <tuple>

#include "espalier/ops/edge_logprobs/edge_distribution.h"

namespace espalier::detail {

/// The arguments of edge_logprobs.
struct EdgeLogprobsArguments {
  at::Tensor hidden, weight, edge_row, edge_target;

  static auto all(auto& given) {
    return std::tie(given.hidden, given.weight, given.edge_row, given.edge_target);
  }
};
using EdgeLogprobsResults = std::tuple<at::Tensor, at::Tensor>;  // logprobs, lse

/// The first arguments of its backward operators.
struct EdgeLogprobsSaved {
  at::Tensor grad_logprobs;
  EdgeLogprobsArguments given;
  at::Tensor lse;

  static auto all(auto& saved) {
    return std::tuple_cat(std::tie(saved.grad_logprobs), EdgeLogprobsArguments::all(saved.given),
                          std::tie(saved.lse));
  }
};
using HeadGradients = std::tuple<at::Tensor, at::Tensor>;  // of hidden and weight

/// Accumulates into the defined gradients. grad_hidden is in the accumulator dtype; grad_weight too, or
/// zero-filled in the dtype of weight, in which case it is rounded once after all rows have been added. It
/// may have the last columns of the weight alone.
using AddHeadGradients = void (*)(const EdgeLogprobsSaved& saved, const at::Tensor& grad_hidden,
                                  const at::Tensor& grad_weight);

/// Implements the backward operators by such a function.
HeadGradients head_gradients(const EdgeLogprobsSaved& saved, std::array<bool, 2> wanted,
                             AddHeadGradients add);
at::Tensor add_head_gradients(const EdgeLogprobsSaved& saved, const TensorOrNone& grad_weight,
                              AddHeadGradients add);
template <AddHeadGradients kAdd>
HeadGradients head_gradients_by(const EdgeLogprobsSaved& saved, std::array<bool, 2> wanted) {
  return head_gradients(saved, wanted, kAdd);
}
template <AddHeadGradients kAdd>
at::Tensor add_head_gradients_by(const EdgeLogprobsSaved& saved, const TensorOrNone& grad_weight) {
  return add_head_gradients(saved, grad_weight, kAdd);
}

/// Checks ranks, shapes, dtypes and devices, but not the values of edge_row and edge_target.
void check_edge_logprobs(const EdgeLogprobsArguments& given);

/// The arguments of edge_distribution.
struct DistributionArguments {
  EdgeLogprobsArguments edges;
  LogitTransform transform;

  static auto all(auto& given) {
    return std::tuple_cat(EdgeLogprobsArguments::all(given.edges), LogitTransform::all(given.transform));
  }
};
/// logprobs, entropy, and, in float64, log-sum-exp and mean under p of the edges' logits.
using DistributionResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The arguments of edge_distribution_backward.
struct DistributionBackward {
  TensorOrNone grad_logprobs, grad_entropy;
  at::Tensor lse, mean;
  DistributionArguments given;
  std::array<bool, 3> wanted{};

  static auto all(auto& backward) {
    return std::tuple_cat(
        std::tie(backward.grad_logprobs, backward.grad_entropy, backward.lse, backward.mean),
        DistributionArguments::all(backward.given), std::tie(backward.wanted));
  }
};
using DistributionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of hidden, weight and bias

/// Checks ranks, shapes, dtypes, devices and scalars, but not the values of tensors.
void check_edge_distribution(const DistributionArguments& given);

}  // namespace espalier::detail
