// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/arguments.h"

#include <ATen/ATen.h>

#include "espalier/ops/attention/mask_blocks.h"
#include "espalier/ops/checks.h"

namespace espalier::detail {

TreeAttentionArguments checked_arguments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                         const at::Tensor& subtree_end, double softmax_scale,
                                         at::TensorList context_k, at::TensorList context_v,
                                         const at::Tensor& context_blocks) {
  check_tree_attention(q, k, v, subtree_end);
  check_attention_context(k, context_k, context_v, context_blocks);
  return {q, k, v, subtree_end, softmax_scale, {context_k.vec(), context_v.vec(), context_blocks}};
}

std::vector<ContextRectangle> context_rectangles(const at::Tensor& context_blocks, at::TensorList context_k,
                                                 int64_t num_tokens) {
  std::vector<int64_t> segment_sizes;
  for (const at::Tensor& segment : context_k) segment_sizes.push_back(segment.size(0));
  const at::Tensor numbers = context_blocks.contiguous();
  std::vector<ContextRectangle> result;
  const auto narrow = [](int64_t number) { return static_cast<int32_t>(number); };
  for (const auto& level :
       context_blocks_by_level({numbers.const_data_ptr<int64_t>(), static_cast<size_t>(numbers.numel())},
                               segment_sizes, num_tokens)) {
    for (const MaskBlock& block : level) {
      result.push_back({narrow(block.segment), narrow(block.column_begin), narrow(block.column_end),
                        narrow(block.row_begin), narrow(block.row_end)});
    }
  }
  return result;
}

namespace {

at::Tensor joined(std::vector<at::Tensor> segments, const at::Tensor& own, at::ScalarType dtype) {
  if (segments.empty()) return own.to(dtype).contiguous();
  segments.push_back(own);
  return at::cat(segments).to(dtype);
}

}  // namespace

AllKeys::AllKeys(const TreeAttentionArguments& arguments, at::ScalarType dtype)
    : k(joined(arguments.context.k, arguments.k, dtype)), v(joined(arguments.context.v, arguments.v, dtype)) {
  for (const at::Tensor& segment : arguments.context.k) lengths.push_back(segment.size(0));
  lengths.push_back(arguments.k.size(0));
}

TreeAttentionGradients split_gradients(const TreeAttentionArguments& arguments, const at::Tensor& grad_q,
                                       const at::Tensor& grad_k, const at::Tensor& grad_v) {
  const auto like = [](const at::Tensor& tensor, const at::Tensor& gradient) {
    return at::empty(tensor.sizes(), tensor.options()).copy_(gradient);
  };
  const auto split = [&](const std::vector<at::Tensor>& segments, const at::Tensor& own,
                         const at::Tensor& gradient) {
    std::vector<at::Tensor> result;
    int64_t begin = 0;
    for (const at::Tensor& segment : segments) {
      result.push_back(like(segment, gradient.slice(0, begin, begin + segment.size(0))));
      begin += segment.size(0);
    }
    return std::pair(like(own, gradient.slice(0, begin)), std::move(result));
  };
  auto [own_k, context_k] = split(arguments.context.k, arguments.k, grad_k);
  auto [own_v, context_v] = split(arguments.context.v, arguments.v, grad_v);
  return {like(arguments.q, grad_q), std::move(own_k), std::move(own_v), std::move(context_k),
          std::move(context_v)};
}

}  // namespace espalier::detail
