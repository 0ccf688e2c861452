// SPDX-License-Identifier: Apache-2.0
// Shared by implementations of tree_attention on any device.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/kernels/key_block.h"

namespace espalier::detail {

/// The arguments of the operator espalier::tree_attention (tree_attention.h). context.blocks is defined.
struct TreeAttentionArguments {
  at::Tensor q, k, v;
  ForestTokens tokens;
  AttentionOptions options;
  AttentionContext context;

  static auto all(auto& given) {
    return std::tie(given.q, given.k, given.v, given.tokens.subtree_end, given.options.softmax_scale,
                    given.context.k, given.context.v, given.context.blocks, given.options.sliding_window,
                    given.tokens.position, given.context.positions, given.options.sinks,
                    given.options.softcap);
  }
};

/// The arguments of espalier::tree_attention_backward. Gradients depend on sinks only through lse.
struct TreeAttentionBackward {
  at::Tensor grad_out, out, lse;
  TreeAttentionArguments given;  // without sinks

  static auto all(auto& backward) {
    auto& given = backward.given;
    return std::tie(backward.grad_out, given.q, given.k, given.v, given.tokens.subtree_end, backward.out,
                    backward.lse, given.options.softmax_scale, given.context.k, given.context.v,
                    given.context.blocks, given.options.sliding_window, given.tokens.position,
                    given.context.positions, given.options.softcap);
  }
};

/// The results of espalier::tree_attention: out [T, H, E] and lse [H, T].
using TreeAttentionResults = std::tuple<at::Tensor, at::Tensor>;

/// The results of espalier::tree_attention_backward: gradients of q, k, v, context_k and context_v.
using TreeAttentionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>>;

/// Checks ranks, shapes, dtypes and devices, but not the values of subtree_end and of the context's blocks.
void check_tree_attention(const TreeAttentionArguments& given);

/// The context blocks for kernels on raw pointers, outer ranges of queries before those that are nested in
/// them. Throws InputError unless keys lie in their segment and queries in [0, num_tokens), none is empty, no
/// key of a segment is named twice, and any two ranges of queries are nested or disjoint.
std::vector<ContextRectangle> context_rectangles(const AttentionContext& context, int64_t num_tokens);

/// The position of every context key, segment by segment; 0 for keys in no block. Blocks must be valid.
std::vector<int32_t> context_key_positions(const AttentionContext& context);

/// The keys and values of the context's segments, followed by the tokens' own, concatenated, so that every
/// block of the mask is a range of columns. The copy is cheap compared to attention.
struct AllKeys {
  at::Tensor k, v;               // [S_0 + S_1 + ... + T, K, D] and [..., K, E], contiguous
  std::vector<int64_t> lengths;  // S_0, S_1, ..., T

  AllKeys(const TreeAttentionArguments& arguments, at::ScalarType dtype);
  int64_t own_begin() const { return k.size(0) - lengths.back(); }
};

/// Splits gradients of all keys and values into the results of the operator.
TreeAttentionGradients split_gradients(const TreeAttentionArguments& arguments, const at::Tensor& grad_q,
                                       const at::Tensor& grad_k, const at::Tensor& grad_v);

}  // namespace espalier::detail
