// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/arguments.h"

#include <ATen/ATen.h>

#include <limits>
#include <numeric>

#include "espalier/ops/attention/mask_blocks.h"
#include "espalier/ops/checks.h"

namespace espalier::detail {
namespace {

void check_window_and_sinks(const TreeAttentionArguments& arguments) {
  const at::Tensor& q = arguments.q;
  const int64_t window = arguments.options.sliding_window;
  TORCH_CHECK(0 <= window && window <= std::numeric_limits<int32_t>::max(),
              "tree_attention: expected a sliding_window of 1 or more, or 0 for none, received ", window);
  if (window > 0) {
    const at::Tensor& position = arguments.tokens.position;
    TORCH_CHECK(position.defined() && position.scalar_type() == at::kInt && position.device() == q.device() &&
                    position.dim() == 1 && position.sym_size(0) == q.sym_size(0),
                "tree_attention: expected position [", q.sym_size(0), "] int32 on ", q.device(),
                " with a sliding_window, received ", position.toString(), " ",
                position.defined() ? position.sym_sizes() : at::SymIntArrayRef());
    const at::Tensor& blocks = arguments.context.blocks;
    const at::Tensor& first = arguments.context.positions;
    const bool fits = first.defined() && first.scalar_type() == at::kLong && first.device().is_cpu() &&
                      first.dim() == 1 && first.sym_size(0) == blocks.sym_size(0);
    TORCH_CHECK(fits || blocks.sym_size(0) == 0, "tree_attention: expected context_positions [",
                blocks.sym_size(0), "] int64 on the CPU with a sliding_window, received ", first.toString(),
                " ", first.defined() ? first.sym_sizes() : at::SymIntArrayRef());
  }
  const at::Tensor& sinks = arguments.options.sinks;
  const at::ScalarType dtype = q.scalar_type(), sum_dtype = accumulator_dtype(dtype);
  TORCH_CHECK(!sinks.defined() ||
                  (sinks.dim() == 1 && sinks.sym_size(0) == q.sym_size(1) && sinks.device() == q.device() &&
                   (sinks.scalar_type() == dtype || sinks.scalar_type() == sum_dtype)),
              "tree_attention: expected sinks [", q.sym_size(1), "] ", dtype, " or ", sum_dtype, " on ",
              q.device(), ", received ", sinks.toString(), " ",
              sinks.defined() ? sinks.sym_sizes() : at::SymIntArrayRef());
}

}  // namespace

TreeAttentionArguments checked_arguments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                         const at::Tensor& subtree_end, double softmax_scale,
                                         at::TensorList context_k, at::TensorList context_v,
                                         const at::Tensor& context_blocks, int64_t sliding_window,
                                         const OptionalTensor& position,
                                         const OptionalTensor& context_positions,
                                         const OptionalTensor& sinks) {
  check_tree_attention(q, k, v, subtree_end);
  check_attention_context(k, context_k, context_v, context_blocks);
  TreeAttentionArguments arguments{
      q,
      k,
      v,
      {subtree_end, position.value_or(at::Tensor())},
      {softmax_scale, sliding_window, sinks.value_or(at::Tensor())},
      {context_k.vec(), context_v.vec(), context_blocks, context_positions.value_or(at::Tensor())}};
  check_window_and_sinks(arguments);
  return arguments;
}

std::vector<int32_t> context_key_positions(const AttentionContext& context) {
  std::vector<int64_t> begins;
  int64_t num_keys = 0;
  for (const at::Tensor& segment : context.k) {
    begins.push_back(num_keys);
    num_keys += segment.size(0);
  }
  std::vector<int32_t> positions(num_keys);
  if (context.blocks.size(0) == 0) return positions;
  const at::Tensor blocks = context.blocks.contiguous(), first = context.positions.contiguous();
  const int64_t* numbers = blocks.const_data_ptr<int64_t>();
  const int64_t* first_of_block = first.const_data_ptr<int64_t>();
  for (int64_t p = 0; p < blocks.size(0); ++p, numbers += 5) {
    const auto begin = positions.begin() + begins[numbers[0]];
    std::iota(begin + numbers[1], begin + numbers[2], static_cast<int32_t>(first_of_block[p]));
  }
  return positions;
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
