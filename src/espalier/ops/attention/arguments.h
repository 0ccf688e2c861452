// SPDX-License-Identifier: Apache-2.0
// What implementations of tree_attention share, on any device.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

#include "espalier/ops/attention/mask_blocks.h"
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
                    given.tokens.position, given.context.positions, given.options.sinks);
  }
};

/// Those of espalier::tree_attention_backward. Sinks are in lse, which is all that gradients need of them.
struct TreeAttentionBackward {
  at::Tensor grad_out, out, lse;
  TreeAttentionArguments given;  // without sinks

  static auto all(auto& backward) {
    auto& given = backward.given;
    return std::tie(backward.grad_out, given.q, given.k, given.v, given.tokens.subtree_end, backward.out,
                    backward.lse, given.options.softmax_scale, given.context.k, given.context.v,
                    given.context.blocks, given.options.sliding_window, given.tokens.position,
                    given.context.positions);
  }
};

/// The results of espalier::tree_attention: out [T, H, D] and lse [H, T].
using TreeAttentionResults = std::tuple<at::Tensor, at::Tensor>;

/// The results of espalier::tree_attention_backward: gradients of q, k, v, context_k and context_v.
using TreeAttentionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>>;

/// Ranks, shapes, dtypes and devices; not the values of subtree_end and of the context's blocks.
void check_tree_attention(const TreeAttentionArguments& given);

/// The context's blocks, checked (mask_blocks.h), and the same for kernels on raw pointers.
std::vector<std::vector<MaskBlock>> context_levels(const AttentionContext& context, int64_t num_tokens);
std::vector<ContextRectangle> context_rectangles(const AttentionContext& context, int64_t num_tokens);

/// The position of every key of the context, segment after segment; 0 of keys that no block names. Blocks are
/// taken as checked.
std::vector<int32_t> context_key_positions(const AttentionContext& context);

/// The keys and values of the context's segments, followed by the tokens' own, in one tensor each: a
/// copy of the context costs little beside attention to it, and every block of the mask is then a range of
/// columns.
struct AllKeys {
  at::Tensor k, v;               // [S_0 + S_1 + ... + T, K, D], contiguous
  std::vector<int64_t> lengths;  // S_0, S_1, ..., T

  AllKeys(const TreeAttentionArguments& arguments, at::ScalarType dtype);
  int64_t own_begin() const { return k.size(0) - lengths.back(); }
};

/// Gradients of q and of all keys and values, as the operator returns them.
TreeAttentionGradients split_gradients(const TreeAttentionArguments& arguments, const at::Tensor& grad_q,
                                       const at::Tensor& grad_k, const at::Tensor& grad_v);

}  // namespace espalier::detail
