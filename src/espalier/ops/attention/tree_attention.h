// SPDX-License-Identifier: Apache-2.0
// Attention over a forest in preorder.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/ops/argument.h"

namespace espalier {

/// The tokens of the forest: subtree_end [T] int32, one past the last token of the subtree of the token's
/// node, and position [T] int32 on the root path, required only with a sliding window; both on the device of
/// q.
struct ForestTokens {
  at::Tensor subtree_end;
  TensorOrNone position = {};
};

/// Options of the softmax and mask. With a sliding window, token j attends to its ancestor i (including
/// itself) only if position[j] - position[i] < sliding_window (Beltagy et al., Longformer, 2020; Jiang et
/// al., Mistral 7B, 2023). sinks: a logit per query head that is added to the denominator of the softmax, so
/// that the weights of the keys may sum to less than 1 (OpenAI, gpt-oss model card, 2025). softcap: scores s
/// of keys, but not sinks, become softcap * tanh(s / softcap) (Gemma Team, Gemma 2, 2024, section 2).
struct AttentionOptions {
  double softmax_scale = 1;
  int64_t sliding_window = 0;  // 0: none
  TensorOrNone sinks = {};     // [H] on the device of q, in its dtype or the accumulator dtype
  double softcap = 0;          // 0: none
};

/// Keys and values of ancestors of the forest that are not among its tokens. Segment s holds k[s]
/// [S_s, K, D] and v[s] [S_s, K, E]; on the CPU they are read in place. blocks [P, 5] int64 on the CPU
/// defines visibility: each row is segment, key_begin, key_end, query_begin, query_end, and queries
/// [query_begin, query_end) attend to all of the segment's keys [key_begin, key_end), within a sliding
/// window. Query ranges must be nested or disjoint; a key must not be in two blocks; keys in no block are not
/// visible. positions [P] int64 on the CPU, required only with a sliding window: position of the first key of
/// each block. The keys of a block are consecutive on a root path.
struct AttentionContext {
  std::vector<at::Tensor> k;
  std::vector<at::Tensor> v;
  at::Tensor blocks = {};  // undefined: no context
  TensorOrNone positions = {};
};

/// Differentiable attention in which token j attends to token i iff i <= j < subtree_end[i] (docs/math.md),
/// and to the context.
///   q [T, H, D], k [T, K, D], v [T, K, E] of one dtype (float64, float32, bfloat16); H a multiple of K:
///   query head h reads key head h / (H / K).
/// Returns [T, H, E] of the same dtype: softmax(softmax_scale q k^T) v. Scores, their log-sum-exp (natural
/// log; over the keys and the sink) and sums over blocks are kept in float32 (float64 for float64).
/// Deterministic, except gradients of bfloat16 and float16 on CUDA unless deterministic algorithms are
/// enabled. On CUDA the environment variable ESPALIER_ATTENTION overrides the implementation
/// (attention/cuda.h). Registered as torch.ops.espalier.tree_attention(q, k, v, subtree_end, softmax_scale,
/// context_k, context_v, context_blocks, sliding_window=0, position=None, context_positions=None, sinks=None,
/// softcap=0.) -> (out, lse [H, T]); gradients flow to context_k, context_v and sinks too. Throws on
/// mismatched shapes, dtypes or devices, on a window without positions, on invalid context blocks, and unless
/// subtree_end is that of a forest in preorder (not checked by attention/fused.h and attention/masked.h).
at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const ForestTokens& tokens, const AttentionOptions& options,
                          const AttentionContext& context = {});

}  // namespace espalier
