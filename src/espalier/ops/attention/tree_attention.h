// SPDX-License-Identifier: Apache-2.0
// Attention over a forest in preorder.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/ops/argument.h"

namespace espalier {

/// The tokens of the forest: subtree_end [T] int32, one past the last token of the subtree of the token's
/// node, and position [T] int32 on the root path, which sliding windows alone need; both on the device of q.
struct ForestTokens {
  at::Tensor subtree_end;
  TensorOrNone position = {};
};

/// How keys are weighted. With a sliding window, token j sees its ancestor i (itself included) only where
/// position[j] - position[i] < sliding_window (Beltagy et al., Longformer, 2020; Jiang et al., Mistral 7B,
/// 2023). sinks: a logit per query head that takes part in the softmax's denominator and has no value, so
/// that the weights of the keys may sum to less than 1 (OpenAI, gpt-oss model card, 2025).
struct AttentionOptions {
  double softmax_scale = 1;
  int64_t sliding_window = 0;  // 0: none
  TensorOrNone sinks = {};     // [H] on the device of q, in its dtype or that of sums
};

/// Keys and values of tokens that stand before the forest on root paths and are not among its tokens. Segment
/// s holds k[s] and v[s] [S_s, K, D]; the CPU reads them in place. blocks [P, 5] int64 on the CPU says who
/// sees what: each row is segment, key_begin, key_end, query_begin, query_end, and queries [query_begin,
/// query_end) attend to all of the segment's keys [key_begin, key_end), as far as a sliding window lets them.
/// Query ranges are nested or disjoint; no key is named twice; keys that are not named are seen by nobody.
/// positions [P] int64 on the CPU, which sliding windows alone need: of the first key of each block; the keys
/// of a block follow each other on one root path.
struct AttentionContext {
  std::vector<at::Tensor> k;
  std::vector<at::Tensor> v;
  at::Tensor blocks = {};  // undefined: no context
  TensorOrNone positions = {};
};

/// Differentiable attention in which token j attends to token i iff i <= j < subtree_end[i] (docs/math.md),
/// and to the context.
///   q [T, H, D], k [T, K, D], v [T, K, D] of one dtype (float64, float32, bfloat16); H a multiple of K:
///   query head h reads key head h / (H / K).
/// Returns [T, H, D] of the same dtype: softmax(softmax_scale q k^T) v. Scores, their log-sum-exp (natural
/// log; over the keys and the sink) and sums over blocks are kept in float32 (float64 for float64).
/// Deterministic, but for the gradients of bfloat16 and float16 on CUDA, unless ATen is asked for
/// deterministic algorithms. There the environment variable ESPALIER_ATTENTION chooses the implementation
/// (attention/cuda.h). Registered as torch.ops.espalier.tree_attention(q, k, v, subtree_end, softmax_scale,
/// context_k, context_v, context_blocks, sliding_window=0, position=None, context_positions=None, sinks=None)
/// -> (out, lse [H, T]); gradients flow to context_k, context_v and sinks too. Throws on mismatched shapes,
/// dtypes or devices, where a window lacks positions, where the context's blocks are not as said, and where
/// subtree_end is not that of a forest in preorder (fused kernels and chunks with a mask do not check
/// it: attention/fused.h, attention/masked.h).
at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const ForestTokens& tokens, const AttentionOptions& options,
                          const AttentionContext& context = {});

/// Plain forms, composed of ATen's operators and differentiated by autograd, which tests compare with.
namespace reference {

/// By a dense mask over all context keys and the T own ones.
at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const ForestTokens& tokens, const AttentionOptions& options,
                          const AttentionContext& context = {});

/// The [T, T] mask (row: query, column: key) of subtree_end, bool.
at::Tensor visibility_mask(const at::Tensor& subtree_end);

}  // namespace reference

}  // namespace espalier
