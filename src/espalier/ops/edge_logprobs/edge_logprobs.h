// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of edges: of target tokens given the hidden state that predicts them.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace espalier {

/// Differentiable log softmax of the LM head, gathered at the targets; without materialising the logits.
///   hidden [R, C] final hidden states of the rows that predict at least one target; weight [V, C] of the
///   same dtype (float64, float32, bfloat16); edge_row [E] int64, ascending, in [0, R): the row that predicts
///   edge e; edge_target [E] int64 in [0, V). Several edges may share a row (a branching token has several
///   targets).
/// Returns log p(edge_target[e] | hidden[edge_row[e]]) [E], natural log, float32 (float64 for float64).
/// Logits are processed in blocks and summed in float32 (float64); backward recomputes them block by block.
/// Peak extra memory: one block (ops/edge_logprobs/logit_blocks.h), independent of R, E and V, plus a few
/// numbers per row and, if bfloat16 is multiplied in float32, the upcast rows. Bitwise identical for any
/// number of threads. On CUDA blocks are larger (device_logit_block), and the values of edge_row and
/// edge_target are not checked, to avoid a synchronisation. Registered as
/// torch.ops.espalier.edge_logprobs(hidden, weight, edge_row, edge_target) -> (logprobs, lse [R], float64,
/// since an error in it would scale the row's gradients).
at::Tensor edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target);

/// Forward and backward of edge_logprobs without autograd.
/// Returns the log-probabilities [E], float32 (float64), and the rows' log-sum-exp [R], float64.
std::tuple<at::Tensor, at::Tensor> edge_logprobs_forward(const at::Tensor& hidden, const at::Tensor& weight,
                                                         const at::Tensor& edge_row,
                                                         const at::Tensor& edge_target);

/// Returns the gradient of hidden, and adds that of weight, or of its last columns alone, to grad_weight
/// [V, C or fewer] in place, which is float32 (float64), or undefined to skip it. Registered as
/// torch.ops.espalier.edge_logprobs_backward_.
at::Tensor edge_logprobs_backward(const at::Tensor& grad_logprobs, const at::Tensor& hidden,
                                  const at::Tensor& weight, const at::Tensor& edge_row,
                                  const at::Tensor& edge_target, const at::Tensor& lse,
                                  const at::Tensor& grad_weight);

}  // namespace espalier
