// SPDX-License-Identifier: Apache-2.0
// Checks of what the operators are given, shared by their implementations for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "espalier/ops/moe/moe.h"

namespace espalier::detail {

/// Ranks, shapes, dtypes and devices of tree_attention's arguments; not the values of subtree_end.
void check_tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& subtree_end);

/// The same of the context, given tree_attention's own k; not the values of context_blocks.
void check_attention_context(const at::Tensor& k, at::TensorList context_k, at::TensorList context_v,
                             const at::Tensor& context_blocks);

/// Ranks, shapes, dtypes and devices of edge_logprobs' arguments; not the values of edge_row and edge_target.
void check_edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target);

/// Shape, dtype and device of what edge_logprobs_backward_ adds to.
void check_head_gradient(const at::Tensor& weight, const std::optional<at::Tensor>& grad_weight);

/// Shapes, dtypes and devices of rms_norm's arguments; `other` is of the shape of x, if it is defined.
void check_rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& other, const at::Tensor& weight);

/// Ranks, shapes, dtypes and devices of rotary's arguments.
void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// Shapes, dtypes and devices of swiglu's arguments.
void check_swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Rank, shape and dtype of clamped_swiglu's argument, and the limit.
void check_clamped_swiglu(const at::Tensor& gate_up, double limit);

/// Shapes, dtypes and devices of route's arguments, and the ranges of its options.
void check_route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
                 const RouterOptions& options);

/// Shape, dtype and device of the experts that route is given; not their values.
void check_routes(const at::Tensor& logits, const at::Tensor& experts, int64_t top_k);

/// Shapes, dtypes and devices of moe's x and routing; not the values of its experts.
void check_moe(const at::Tensor& x, const Routing& routing);

/// The same of the operator's experts.
void check_moe_experts(const at::Tensor& x, const ExpertWeights& experts);

/// What an argument must be; `shape` says it in letters.
struct ExpectedTensor {
  const char* shape;
  at::IntArrayRef sizes;
  at::TensorOptions options;  // dtype and device
};
void check_tensor(const char* op, const char* name, const at::Tensor& tensor, const ExpectedTensor& expected);

/// float64 for float64, otherwise float32: the dtype in which sums are kept.
at::ScalarType accumulator_dtype(at::ScalarType dtype);

}  // namespace espalier::detail
