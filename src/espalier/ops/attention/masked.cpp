// SPDX-License-Identifier: Apache-2.0
// Every key is visible to one range of queries: token i to [i, subtree_end[i]), a context key to those of its
// block. The mask of a chunk takes two comparisons per pair, three with a sliding window. Query heads that
// share a key head are rows of one matrix, so keys and values need no expansion.
#include "espalier/ops/attention/masked.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "espalier/ops/checks.h"

namespace espalier::masked_chunks {
namespace {

/// [S] each, int32: key j is visible to queries [begin[j], end[j]).
struct Viewers {
  at::Tensor begin, end;
};

Viewers context_viewers(const AttentionContext& context, int64_t num_keys, int64_t num_tokens) {
  std::vector<int64_t> first_keys{0};
  for (const at::Tensor& segment : context.k) first_keys.push_back(first_keys.back() + segment.size(0));
  const at::Tensor begin = at::zeros({num_keys}, at::kInt), end = at::zeros({num_keys}, at::kInt);
  for (const ContextRectangle& block : detail::context_rectangles(context, num_tokens)) {
    const int64_t first = first_keys[block.segment];
    const auto keys = [&](const at::Tensor& all) {
      return all.slice(0, first + block.key_begin, first + block.key_end);
    };
    keys(begin).fill_(block.query_begin);
    keys(end).fill_(block.query_end);
  }
  return {begin, end};
}

/// Arguments prepared for forward and backward.
struct Call {
  at::ScalarType dtype;
  int64_t num_tokens, num_key_heads, group, own_begin;
  double softmax_scale, softcap;
  at::Tensor q;  // [T, H, D]
  at::Tensor k;  // [K, S, D]
  at::Tensor v;  // [K, S, E]
  Viewers viewers;
  int64_t sliding_window;
  at::Tensor row_positions, key_positions;  // [T] and [S], with a window
  at::Tensor sinks;                         // [1, H, 1], or undefined
  int64_t chunk_rows;

  Call(const detail::TreeAttentionArguments& arguments, int64_t score_bytes)
      : dtype(detail::accumulator_dtype(arguments.q.scalar_type())),
        num_tokens(arguments.q.size(0)),
        num_key_heads(arguments.k.size(1)),
        group(arguments.q.size(1) / arguments.k.size(1)),
        softmax_scale(arguments.options.softmax_scale),
        softcap(arguments.options.softcap),
        q(arguments.q.to(dtype)),
        sliding_window(arguments.options.sliding_window) {
    const detail::AllKeys keys(arguments, dtype);
    own_begin = keys.own_begin();
    const at::Tensor& subtree_end = arguments.tokens.subtree_end;
    const at::Tensor tokens = at::arange(num_tokens, subtree_end.options());
    viewers = {tokens, subtree_end};
    const Viewers context = context_viewers(arguments.context, own_begin, num_tokens);
    if (own_begin > 0) {
      // What nobody sees may have any value, which a product would multiply by a probability of 0.
      const at::Tensor unseen = at::nonzero(context.end.eq(0)).squeeze(1).to(tokens.device());
      for (const at::Tensor& each : {keys.k, keys.v})
        each.index_fill_(0, unseen, 0);  // copies, of context and own
      viewers.begin = at::cat({context.begin.to(tokens.device()), viewers.begin});
      viewers.end = at::cat({context.end.to(tokens.device()), viewers.end});
    }
    k = keys.k.transpose(0, 1);
    v = keys.v.transpose(0, 1);
    if (sliding_window > 0) take_positions(arguments);
    if (arguments.options.sinks.defined()) sinks = arguments.options.sinks.to(dtype).view({1, -1, 1});
    const int64_t row_bytes =
        num_key_heads * group * keys.k.size(0) * static_cast<int64_t>(at::elementSize(dtype));
    chunk_rows = std::max<int64_t>(1, score_bytes / std::max<int64_t>(1, row_bytes));
  }

  /// [R, H, X] -> [K, R G, X], a copy.
  at::Tensor grouped(const at::Tensor& rows) const {
    return rows.reshape({rows.size(0), num_key_heads, group, -1})
        .permute({1, 0, 2, 3})
        .reshape({num_key_heads, rows.size(0) * group, -1});
  }
  /// [K, R G, X] -> [R, H, X].
  at::Tensor ungrouped(const at::Tensor& tensor) const {
    const int64_t rows = tensor.size(1) / group;
    return tensor.view({num_key_heads, rows, group, -1})
        .permute({1, 0, 2, 3})
        .reshape({rows, num_key_heads * group, -1});
  }

  /// Calls work(begin, end, keys) for chunks of queries [begin, end), which only see keys among the first
  /// `keys`.
  template <class Work>
  void for_each_chunk(const Work& work) const {
    for (int64_t begin = 0; begin < num_tokens; begin += chunk_rows) {
      const int64_t end = std::min(num_tokens, begin + chunk_rows);
      work(begin, end, own_begin + end);
    }
  }

  /// [K, R G, keys]: scaled scores of a chunk's queries with the softcap, -inf for masked keys. `slope`, with
  /// a softcap: its derivative at these scores.
  at::Tensor scores(const at::Tensor& grouped_q, int64_t begin, int64_t end, int64_t keys,
                    at::Tensor* slope = nullptr) const {
    const at::Tensor result = grouped_q.bmm(k.slice(1, 0, keys).transpose(1, 2)).mul_(softmax_scale);
    if (softcap > 0) {
      result.div_(softcap).tanh_();
      if (slope != nullptr) *slope = result.square().neg_().add_(1);
      result.mul_(softcap);
    }
    const at::Tensor row = at::arange(begin, end, viewers.begin.options()).view({-1, 1, 1});
    const at::Tensor hidden =
        row.lt(viewers.begin.slice(0, 0, keys)).logical_or_(row.ge(viewers.end.slice(0, 0, keys)));
    if (sliding_window > 0) {
      const at::Tensor position = row_positions.slice(0, begin, end).view({-1, 1, 1});
      hidden.logical_or_((position - key_positions.slice(0, 0, keys)).ge(sliding_window));
    }
    result.view({num_key_heads, end - begin, group, keys})
        .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
    return result;
  }

  /// [K, R G, 1]: the sinks of a chunk's rows.
  at::Tensor chunk_sinks(int64_t num_rows) const {
    return grouped(sinks.expand({num_rows, num_key_heads * group, 1}));
  }

 private:
  void take_positions(const detail::TreeAttentionArguments& arguments) {
    row_positions = arguments.tokens.position;
    key_positions = row_positions;
    if (own_begin == 0) return;
    const at::Tensor context = at::tensor(detail::context_key_positions(arguments.context), at::kInt);
    key_positions = at::cat({context.to(row_positions.device()), row_positions});
  }
};

}  // namespace

detail::TreeAttentionResults tree_attention(const detail::TreeAttentionArguments& arguments,
                                            int64_t score_bytes) {
  const Call call(arguments, score_bytes);
  const at::Tensor out =
      at::empty({call.q.size(0), call.q.size(1), arguments.v.size(2)}, arguments.q.options());
  const at::Tensor lse = at::empty({call.q.size(0), call.q.size(1)}, call.q.options());
  call.for_each_chunk([&](int64_t begin, int64_t end, int64_t keys) {
    const at::Tensor scores = call.scores(call.grouped(call.q.slice(0, begin, end)), begin, end, keys);
    const at::Tensor sinks = call.sinks.defined() ? call.chunk_sinks(end - begin) : at::Tensor();
    at::Tensor high = scores.amax({-1}, /*keepdim=*/true);
    if (sinks.defined()) high = at::maximum(high, sinks);
    scores.sub_(high).exp_();
    const at::Tensor sum = scores.sum({-1}, /*keepdim=*/true);
    if (sinks.defined()) sum.add_(sinks.sub(high).exp_());
    out.slice(0, begin, end).copy_(call.ungrouped(scores.bmm(call.v.slice(1, 0, keys)).div_(sum)));
    lse.slice(0, begin, end).copy_(call.ungrouped(sum.log_().add_(high)).squeeze(-1));
  });
  return {out, lse.t()};
}

detail::TreeAttentionGradients tree_attention_backward(const detail::TreeAttentionArguments& arguments,
                                                       const at::Tensor& grad_out, const at::Tensor& lse,
                                                       int64_t score_bytes) {
  const Call call(arguments, score_bytes);
  const at::Tensor upcast_grad_out = grad_out.to(call.dtype), row_lse = lse.t().unsqueeze(-1);
  const at::Tensor grad_q = at::empty(call.q.sizes(), call.q.options());
  const at::Tensor grad_k = at::zeros(call.k.sizes(), call.q.options());
  const at::Tensor grad_v = at::zeros(call.v.sizes(), call.q.options());
  call.for_each_chunk([&](int64_t begin, int64_t end, int64_t keys) {
    const auto chunk = [&](const at::Tensor& rows) { return call.grouped(rows.slice(0, begin, end)); };
    const at::Tensor q = chunk(call.q), grad = chunk(upcast_grad_out);
    at::Tensor slope;
    const at::Tensor p = call.scores(q, begin, end, keys, &slope);
    const at::Tensor high = p.amax({-1}, /*keepdim=*/true);
    p.sub_(high).exp_();
    const at::Tensor sum = p.sum({-1}, /*keepdim=*/true);
    // Not exp(scores - lse): the rounding error of lse scales a whole row of P, and grows with the scores.
    // lse is only used for the fraction that a sink leaves to the keys, which is exp(0) without one.
    const at::Tensor share = sum.log().add_(high).sub_(chunk(row_lse)).exp_();
    p.mul_(share.div_(sum));
    grad_v.slice(1, 0, keys).baddbmm_(p.transpose(1, 2), grad);
    // Compute delta from P and dP instead of out and dO, so that the terms of a query with few keys, whose
    // gradient is near 0, cancel exactly.
    const at::Tensor grad_scores = grad.bmm(call.v.slice(1, 0, keys).transpose(1, 2)).mul_(p);
    const at::Tensor delta = grad_scores.sum({-1}, /*keepdim=*/true);
    grad_scores.sub_(p.mul_(delta)).mul_(call.softmax_scale);
    if (slope.defined()) grad_scores.mul_(slope);
    grad_q.slice(0, begin, end).copy_(call.ungrouped(grad_scores.bmm(call.k.slice(1, 0, keys))));
    grad_k.slice(1, 0, keys).baddbmm_(grad_scores.transpose(1, 2), q);
  });
  return detail::split_gradients(arguments, grad_q, grad_k.transpose(0, 1), grad_v.transpose(0, 1));
}

}  // namespace espalier::masked_chunks
