// tree_attention by dense pieces: what the benchmark holds the kernels against.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

namespace espalier::dense_pieces {

/// Arguments and results of the operators espalier::tree_attention and espalier::tree_attention_backward
/// (tree_attention.h) on the CPU; not differentiable.
std::tuple<at::Tensor, at::Tensor> tree_attention(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, const at::Tensor& subtree_end,
                                                  double softmax_scale, at::TensorList context_k,
                                                  at::TensorList context_v, const at::Tensor& context_pieces);

using Gradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>>;

Gradients tree_attention_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                                  const at::Tensor& v, const at::Tensor& subtree_end, const at::Tensor& out,
                                  const at::Tensor& lse, double softmax_scale, at::TensorList context_k,
                                  at::TensorList context_v, const at::Tensor& context_pieces);

}  // namespace espalier::dense_pieces
