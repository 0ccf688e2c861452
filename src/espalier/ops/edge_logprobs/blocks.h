// SPDX-License-Identifier: Apache-2.0
// edge_logprobs by blocks of logits, with the library's own products, on any device: what runs on GPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "espalier/ops/edge_logprobs/logit_blocks.h"

namespace espalier::detail {

/// edge_logprobs_forward by blocks of this size. The values of edge_row and edge_target are not looked at on
/// the host: an edge whose target is outside the vocabulary has NaN or is undefined.
std::tuple<at::Tensor, at::Tensor> edge_logprobs_by_blocks(const at::Tensor& hidden, const at::Tensor& weight,
                                                           const at::Tensor& edge_row,
                                                           const at::Tensor& edge_target,
                                                           const LogitBlock& size);

struct EdgeLogprobsSaved {
  at::Tensor grad_logprobs;
  at::Tensor hidden;
  at::Tensor weight;
  at::Tensor edge_row;
  at::Tensor edge_target;
  at::Tensor lse;
};

/// Adds to the gradients that are defined. That of hidden is in the dtype of sums; that of weight too, or in
/// weight's own and zero: then it is rounded once, when all rows have been added.
void add_edge_logprobs_gradients(const EdgeLogprobsSaved& given, const at::Tensor& grad_hidden,
                                 const at::Tensor& grad_weight, const LogitBlock& size);

}  // namespace espalier::detail
