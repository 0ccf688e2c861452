// SPDX-License-Identifier: Apache-2.0
// Tree attention with a dense mask over context keys and tokens, from ATen operators; autograd differentiates
// it.
#pragma once

#include <ATen/ATen.h>

#include <limits>

#include "espalier/ops/attention/tree_attention.h"

namespace espalier::reference {

inline at::Tensor visibility_mask(const at::Tensor& subtree_end) {
  const at::Tensor token = at::arange(subtree_end.size(0), subtree_end.options());
  const at::Tensor row = token.unsqueeze(1);
  return row.ge(token).logical_and(row.lt(subtree_end));
}

/// [T, S_0 + S_1 + ...] bool: context keys visible to each query.
inline at::Tensor context_mask(const at::Tensor& q, const AttentionContext& context) {
  std::vector<at::Tensor> masks;
  for (const at::Tensor& segment : context.k) {
    masks.push_back(at::zeros({q.size(0), segment.size(0)}, q.options().dtype(at::kBool)));
  }
  for (int64_t p = 0; p < context.blocks.size(0); ++p) {
    const auto number = [&](int64_t i) { return context.blocks[p][i].item<int64_t>(); };
    masks[number(0)].slice(0, number(3), number(4)).slice(1, number(1), number(2)).fill_(true);
  }
  return at::cat(masks, 1);
}

/// [S_0 + S_1 + ... + T]: the position of every key; unspecified for keys that no query sees.
inline at::Tensor key_positions(const ForestTokens& tokens, const AttentionContext& context) {
  std::vector<at::Tensor> positions;
  for (const at::Tensor& segment : context.k) {
    positions.push_back(at::zeros({segment.size(0)}, tokens.position.options()));
  }
  for (int64_t p = 0; !positions.empty() && p < context.blocks.size(0); ++p) {
    const auto number = [&](int64_t i) { return context.blocks[p][i].item<int64_t>(); };
    for (int64_t key = number(1); key < number(2); ++key) {
      positions[number(0)][key] = context.positions[p].item<int64_t>() + key - number(1);
    }
  }
  positions.push_back(tokens.position);
  return at::cat(positions);
}

inline at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const ForestTokens& tokens, const AttentionOptions& options,
                                 const AttentionContext& context = {}) {
  at::Tensor keys = k, values = v, visible = visibility_mask(tokens.subtree_end);
  if (!context.k.empty()) {
    keys = at::cat({at::cat(context.k), k});
    values = at::cat({at::cat(context.v), v});
    visible = at::cat({context_mask(q, context), visible}, 1);
  }
  if (options.sliding_window > 0) {
    const at::Tensor distance = tokens.position.unsqueeze(1) - key_positions(tokens, context);
    visible = visible.logical_and(distance.lt(options.sliding_window));
  }
  const int64_t group = q.size(1) / k.size(1);
  const at::Tensor q_HTD = q.transpose(0, 1);
  const at::Tensor k_HSD = keys.transpose(0, 1).repeat_interleave(group, 0);
  const at::Tensor v_HSD = values.transpose(0, 1).repeat_interleave(group, 0);
  at::Tensor scores = q_HTD.matmul(k_HSD.transpose(1, 2)).mul(options.softmax_scale);
  if (options.softcap > 0) scores = scores.div(options.softcap).tanh().mul(options.softcap);
  scores = scores.masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity());
  if (!options.sinks.defined()) return scores.softmax(-1).matmul(v_HSD).transpose(0, 1);
  const at::Tensor sinks = options.sinks.to(q.scalar_type()).view({-1, 1, 1}).expand({-1, q.size(0), 1});
  const at::Tensor weights = at::cat({scores, sinks}, -1).softmax(-1).slice(-1, 0, keys.size(0));
  return weights.matmul(v_HSD).transpose(0, 1);
}

}  // namespace espalier::reference
