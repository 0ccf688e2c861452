// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/arguments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "espalier/base/check.h"
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
  check_rank(kOp, "v", v, 3);
  check_tensor(kOp, "v", v, {"[T, K, E]", {tokens, key_heads, v.sym_size(2)}, q.options()});
  TORCH_CHECK(v.sym_size(2) > 0, kOp, ": v must be [T, K, E], E > 0, received ", v.sym_sizes());
  TORCH_CHECK(key_heads > 0 && heads > 0 && heads % key_heads == 0, kOp,
              ": the query heads must be a multiple of the key heads, received ", heads, " and ", key_heads);
  check_tensor(kOp, "subtree_end", subtree_end, {"[T]", {tokens}, q.options().dtype(at::kInt)});
}

void check_context(const at::Tensor& k, const at::Tensor& v, const AttentionContext& context) {
  TORCH_CHECK(context.k.size() == context.v.size(), kOp,
              ": context_k and context_v must have one tensor per segment, received ", context.k.size(),
              " and ", context.v.size());
  for (size_t s = 0; s < context.k.size(); ++s) {
    const at::Tensor& keys = context.k[s];
    check_rank(kOp, "context_k", keys, 3);
    check_tensor(kOp, "context_k", keys,
                 {"[S, K, D]", {keys.sym_size(0), k.sym_size(1), k.sym_size(2)}, k.options()});
    check_tensor(kOp, "context_v", context.v[s],
                 {"[S, K, E]", {keys.sym_size(0), k.sym_size(1), v.sym_size(2)}, k.options()});
  }
  check_rank(kOp, "context_blocks", context.blocks, 2);
  check_tensor(kOp, "context_blocks", context.blocks, {"[P, 5]", {context.blocks.sym_size(0), 5}, at::kLong});
}

void check_options(const TreeAttentionArguments& given) {
  const at::Tensor &q = given.q, &sinks = given.options.sinks;
  const c10::SymInt tokens = q.sym_size(0), blocks = given.context.blocks.sym_size(0);
  const int64_t window = given.options.sliding_window;
  const double softcap = given.options.softcap;
  TORCH_CHECK(std::isfinite(softcap) && softcap >= 0, kOp,
              ": softcap must be above 0, or 0 for none, received ", softcap);
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
  check_context(given.k, given.v, given.context);
  check_options(given);
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

namespace {

void check_rectangle(const ContextRectangle& block, int64_t number, const AttentionContext& context,
                     int64_t num_tokens) {
  const int64_t segments = std::ssize(context.k);
  ESPALIER_CHECK(0 <= block.segment && block.segment < segments,
                 "context_blocks[{}]: expected a segment in [0, {}), received {}", number, segments,
                 block.segment);
  const int64_t keys = context.k[block.segment].size(0);
  ESPALIER_CHECK(0 <= block.key_begin && block.key_begin < block.key_end && block.key_end <= keys,
                 "context_blocks[{}]: expected keys inside [0, {}), received [{}, {})", number, keys,
                 block.key_begin, block.key_end);
  ESPALIER_CHECK(
      0 <= block.query_begin && block.query_begin < block.query_end && block.query_end <= num_tokens,
      "context_blocks[{}]: expected queries inside [0, {}), received [{}, {})", number, num_tokens,
      block.query_begin, block.query_end);
}

void check_keys_are_named_once(std::vector<ContextRectangle> blocks) {
  const auto key = [](const ContextRectangle& block) { return std::pair(block.segment, block.key_begin); };
  std::ranges::sort(blocks, {}, key);
  for (size_t i = 1; i < blocks.size(); ++i) {
    ESPALIER_CHECK(blocks[i - 1].segment != blocks[i].segment || blocks[i - 1].key_end <= blocks[i].key_begin,
                   "context_blocks: key {} of segment {} is named twice", blocks[i].key_begin,
                   blocks[i].segment);
  }
}

/// By how many ranges of queries each block's is enclosed. Blocks are sorted, outer ranges first.
std::vector<size_t> depths(const std::vector<ContextRectangle>& blocks) {
  std::vector<size_t> result;
  std::vector<int32_t> open_ends;
  for (const ContextRectangle& block : blocks) {
    while (!open_ends.empty() && open_ends.back() <= block.query_begin) open_ends.pop_back();
    ESPALIER_CHECK(open_ends.empty() || block.query_end <= open_ends.back(),
                   "context_blocks: queries [{}, {}) overlap others that end at {} without being nested",
                   block.query_begin, block.query_end, open_ends.back());
    result.push_back(open_ends.size());
    open_ends.push_back(block.query_end);
  }
  return result;
}

}  // namespace

std::vector<ContextRectangle> context_rectangles(const AttentionContext& context, int64_t num_tokens) {
  const at::Tensor numbers = context.blocks.contiguous();
  const int64_t* row = numbers.const_data_ptr<int64_t>();
  std::vector<ContextRectangle> blocks;
  for (int64_t i = 0; i < numbers.size(0); ++i, row += 5) {
    const auto narrow = [&](int column) {
      return static_cast<int32_t>(std::clamp<int64_t>(row[column], -1, std::numeric_limits<int32_t>::max()));
    };
    blocks.push_back({narrow(0), narrow(1), narrow(2), narrow(3), narrow(4)});
    check_rectangle(blocks.back(), i, context, num_tokens);
  }
  check_keys_are_named_once(blocks);
  std::ranges::sort(blocks, {}, [](const ContextRectangle& block) {
    return std::tuple(block.query_begin, -block.query_end, block.segment, block.key_begin);
  });
  const std::vector<size_t> depth = depths(blocks);
  std::vector<ContextRectangle> result;
  for (size_t level = 0; result.size() < blocks.size(); ++level) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (depth[i] == level) result.push_back(blocks[i]);
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
