// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/one_width.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace espalier::detail {
namespace {

void widen(at::Tensor& tensor, int64_t width) {
  if (tensor.size(-1) < width) tensor = at::constant_pad_nd(tensor, {0, width - tensor.size(-1)});
}

at::Tensor narrowed(const at::Tensor& tensor, int64_t width) {
  return tensor.narrow(-1, 0, width).contiguous();
}

std::vector<at::Tensor> narrowed(const std::vector<at::Tensor>& tensors, int64_t width) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) result.push_back(narrowed(tensor, width));
  return result;
}

}  // namespace

bool has_one_width(const TreeAttentionArguments& arguments) {
  return arguments.k.size(2) == arguments.v.size(2);
}

TreeAttentionArguments in_one_width(TreeAttentionArguments arguments) {
  const int64_t width = std::max(arguments.k.size(2), arguments.v.size(2));
  for (at::Tensor* tensor : {&arguments.q, &arguments.k, &arguments.v}) widen(*tensor, width);
  for (auto* segments : {&arguments.context.k, &arguments.context.v}) {
    for (at::Tensor& segment : *segments) widen(segment, width);
  }
  return arguments;
}

TreeAttentionBackward in_one_width(TreeAttentionBackward backward) {
  backward.given = in_one_width(backward.given);
  for (at::Tensor* tensor : {&backward.grad_out, &backward.out}) widen(*tensor, backward.given.v.size(2));
  return backward;
}

TreeAttentionResults narrowed(const TreeAttentionArguments& arguments, const TreeAttentionResults& results) {
  const auto& [out, lse] = results;
  return {narrowed(out, arguments.v.size(2)), lse};
}

TreeAttentionGradients narrowed(const TreeAttentionArguments& arguments,
                                const TreeAttentionGradients& gradients) {
  const auto& [q, k, v, context_k, context_v] = gradients;
  const int64_t keys = arguments.k.size(2), values = arguments.v.size(2);
  return {narrowed(q, keys), narrowed(k, keys), narrowed(v, values), narrowed(context_k, keys),
          narrowed(context_v, values)};
}

}  // namespace espalier::detail
