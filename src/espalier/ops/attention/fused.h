// SPDX-License-Identifier: Apache-2.0
// Tensor interface of the fused tree attention kernels (kernels/cuda/attention/tree_attention.h). Does not
// synchronise with the GPU, so values of subtree_end are not checked; results are undefined unless it is that
// of a forest in preorder.
#pragma once

#include "espalier/ops/attention/arguments.h"
#include "espalier/ops/kernels/cuda/attention/tree_attention.h"

namespace espalier::fused {

/// Whether the kernels are in this build and the current CUDA device supports such inputs.
bool serves(at::ScalarType dtype, int64_t head_dim);

/// The functions of kernels/cuda/attention/tree_attention.h, or test doubles.
struct Kernels {
  cuda::AttentionMemory (*forward_memory)(const cuda::AttentionProblem&);
  cuda::AttentionMemory (*backward_memory)(const cuda::AttentionProblem&);
  void (*attend)(const cuda::AttentionProblem&, const cuda::AttentionOutputs&, void* scratch, void* stream);
  void (*attend_backward)(const cuda::AttentionProblem&, const cuda::AttentionGradients&, void* scratch,
                          void* stream);
  bool (*is_capturing)(void* stream);  // graph capture
};

/// The kernels of this build. Throws c10::Error if it has none.
Kernels cuda_kernels();

/// espalier::tree_attention and its backward for bfloat16 and float16, on the current stream of the tensors'
/// device. Requires a positive softmax_scale, no sliding window, no sinks and no softcap. Where keys and
/// values differ in width, kernels get copies of one width. Gradients of q are accumulated by atomics unless
/// at::globalContext().deterministicAlgorithms().
detail::TreeAttentionResults tree_attention(const Kernels& kernels,
                                            const detail::TreeAttentionArguments& arguments);
detail::TreeAttentionGradients tree_attention_backward(const Kernels& kernels,
                                                       const detail::TreeAttentionArguments& arguments,
                                                       const at::Tensor& grad_out, const at::Tensor& out,
                                                       const at::Tensor& lse);

}  // namespace espalier::fused
