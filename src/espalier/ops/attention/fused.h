// SPDX-License-Identifier: Apache-2.0
// Tree attention by fused kernels on raw pointers (kernels/cuda/attention/tree_attention.h): tensors to and
// from them. Nothing here waits for the GPU, so values of subtree_end are not checked; where they are not
// those of a forest in preorder, results are undefined.
#pragma once

#include "espalier/ops/attention/arguments.h"
#include "espalier/ops/kernels/cuda/attention/tree_attention.h"

namespace espalier::fused {

/// Whether these kernels are in this build and, on the current CUDA device, take such inputs forward, and
/// they or Ampere's backward.
bool serves(cuda::AttentionKernels kernels, at::ScalarType dtype, int64_t head_dim);

/// The functions of kernels/cuda/attention/tree_attention.h, or stand-ins for them, and the kernels asked
/// for.
struct Kernels {
  cuda::AttentionKernels kernels;
  cuda::AttentionMemory (*forward_memory)(const cuda::AttentionProblem&);
  cuda::AttentionMemory (*backward_memory)(const cuda::AttentionProblem&);
  void (*attend)(const cuda::AttentionProblem&, const cuda::AttentionOutputs&, void* scratch, void* stream);
  void (*attend_backward)(const cuda::AttentionProblem&, const cuda::AttentionGradients&, void* scratch,
                          void* stream);
  bool (*is_capturing)(void* stream);  // into a graph
};

/// Of this build. Throws c10::Error where it has none.
Kernels cuda_kernels(cuda::AttentionKernels kernels);

/// As the operators espalier::tree_attention and its backward, for bfloat16 and float16, on the device of the
/// tensors and its current stream. softmax_scale is positive, and there is neither a sliding window nor a
/// sink. Gradients of q are summed by atomics unless at::globalContext().deterministicAlgorithms().
detail::TreeAttentionResults tree_attention(const Kernels& kernels,
                                            const detail::TreeAttentionArguments& arguments);
detail::TreeAttentionGradients tree_attention_backward(const Kernels& kernels,
                                                       const detail::TreeAttentionArguments& arguments,
                                                       const at::Tensor& grad_out, const at::Tensor& out,
                                                       const at::Tensor& lse);

}  // namespace espalier::fused
