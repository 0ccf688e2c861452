// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/arguments.h"

#include <ATen/ATen.h>

#include <limits>
#include <numeric>

#include "espalier/ops/checks.h"

namespace espalier::detail {
namespace {

constexpr const char* kOp = "tree_attention";

void check_tokens(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& subtree_end) {
  const bool half = q.scalar_type() == at::kHalf;
  TORCH_CHECK(!half || !q.device().is_cpu(), kOp,
              ": float16 needs a GPU; on the CPU q must be float64, float32 or bfloat16");
  if (!half) check_float(kOp, "q", q);
  check_rank(kOp, "q", q, 3);
  check_rank(kOp, "k", k, 3);
  const c10::SymInt tokens = q.sym_size(0), heads = q.sym_size(1), key_heads = k.sym_size(1);
  TORCH_CHECK(q.sym_size(2) > 0, kOp, ": q must be [T, H, D], D > 0, received ", q.sym_sizes());
  check_tensor(kOp, "k", k, {"[T, K, D]", {tokens, key_heads, q.sym_size(2)}, q.options()});
  check_tensor(kOp, "v", v, {"[T, K, D]", k.sym_sizes(), q.options()});
  TORCH_CHECK(key_heads > 0 && heads > 0 && heads % key_heads == 0, kOp,
              ": the query heads must be a multiple of the key heads, received ", heads, " and ", key_heads);
  check_tensor(kOp, "subtree_end", subtree_end, {"[T]", {tokens}, q.options().dtype(at::kInt)});
}

void check_context(const at::Tensor& k, const AttentionContext& context) {
  TORCH_CHECK(context.k.size() == context.v.size(), kOp,
              ": context_k and context_v must have one tensor per segment, received ", context.k.size(),
              " and ", context.v.size());
  for (size_t s = 0; s < context.k.size(); ++s) {
    const at::Tensor& keys = context.k[s];
    check_rank(kOp, "context_k", keys, 3);
    check_tensor(kOp, "context_k", keys,
                 {"[S, K, D]", {keys.sym_size(0), k.sym_size(1), k.sym_size(2)}, k.options()});
    check_tensor(kOp, "context_v", context.v[s], {"[S, K, D]", keys.sym_sizes(), k.options()});
  }
  check_rank(kOp, "context_blocks", context.blocks, 2);
  check_tensor(kOp, "context_blocks", context.blocks, {"[P, 5]", {context.blocks.sym_size(0), 5}, at::kLong});
}

void check_window_and_sinks(const TreeAttentionArguments& given) {
  const at::Tensor &q = given.q, &sinks = given.options.sinks;
  const c10::SymInt tokens = q.sym_size(0), blocks = given.context.blocks.sym_size(0);
  const int64_t window = given.options.sliding_window;
  TORCH_CHECK(0 <= window && window <= std::numeric_limits<int32_t>::max(), kOp,
              ": expected a sliding_window of 1 or more, or 0 for none, received ", window);
  if (window > 0) {
    check_tensor(kOp, "position", given.tokens.position, {"[T]", {tokens}, q.options().dtype(at::kInt)});
    if (blocks != 0)
      check_tensor(kOp, "context_positions", given.context.positions, {"[P]", {blocks}, at::kLong});
  }
  if (!sinks.defined()) return;
  const at::ScalarType sums = accumulator_dtype(q.scalar_type());
  const auto dtype = sinks.scalar_type() == sums ? sums : q.scalar_type();
  check_tensor(kOp, "sinks", sinks, {"[H]", {q.sym_size(1)}, q.options().dtype(dtype)});
}

}  // namespace

void check_tree_attention(const TreeAttentionArguments& given) {
  check_tokens(given.q, given.k, given.v, given.tokens.subtree_end);
  check_context(given.k, given.context);
  check_window_and_sinks(given);
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

std::vector<std::vector<MaskBlock>> context_levels(const AttentionContext& context, int64_t num_tokens) {
  std::vector<int64_t> segment_sizes;
  for (const at::Tensor& segment : context.k) segment_sizes.push_back(segment.size(0));
  const at::Tensor numbers = context.blocks.contiguous();
  return context_blocks_by_level({numbers.const_data_ptr<int64_t>(), static_cast<size_t>(numbers.numel())},
                                 segment_sizes, num_tokens);
}

std::vector<ContextRectangle> context_rectangles(const AttentionContext& context, int64_t num_tokens) {
  std::vector<ContextRectangle> result;
  const auto narrow = [](int64_t number) { return static_cast<int32_t>(number); };
  for (const auto& level : context_levels(context, num_tokens)) {
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
