// SPDX-License-Identifier: Apache-2.0
// Plain references of the ops: dense, composed of ATen operators, differentiated by autograd. The ops
// are tested against them. They are too slow and too large to train with.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/causal_conv1d/causal_conv1d.h"
#include "espalier/ops/edge_logprobs/edge_distribution.h"
#include "espalier/ops/gated_delta/gated_delta.h"
#include "espalier/ops/moe/moe.h"
#include "espalier/ops/ssm_scan/ssm_scan.h"

namespace espalier::reference {

/// Same contract as espalier::tree_attention, by a dense mask over all context keys and the T own ones.
at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const ForestTokens& tokens, const AttentionOptions& options,
                          const AttentionContext& context = {});

/// The [T, T] mask (row: query, column: key) of subtree_end, bool.
at::Tensor visibility_mask(const at::Tensor& subtree_end);

/// Same contract as espalier::edge_logprobs, by log_softmax of all logits.
at::Tensor edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target);

/// Same contract as espalier::edge_distribution, by log_softmax of all logits of every edge.
EdgeDistribution edge_distribution(const at::Tensor& hidden, const at::Tensor& weight,
                                   const at::Tensor& edge_row, const at::Tensor& edge_target,
                                   const LogitTransform& transform);

/// Same contracts as the operators of ops/elementwise/elementwise.h; of rms_norm the y, without an addend.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Same contract as espalier::route, token by token.
Routing route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
              const RouterOptions& options);

/// Same contract as espalier::moe of ExpertWeights, token by token.
at::Tensor moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts);

/// Same contracts as espalier::causal_conv1d, causal_conv1d_tails, gated_delta_rule and ssm_scan,
/// token by token.
at::Tensor causal_conv1d(const CausalConv1d& given);
at::Tensor causal_conv1d_tails(const CausalConv1d& given, const at::Tensor& ends);
GatedDeltaOutput gated_delta_rule(const GatedDeltaRule& given);
SsmScanOutput ssm_scan(const SsmScan& given);

}  // namespace espalier::reference
