// Attention over a forest in preorder.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

/// Differentiable attention in which token j attends to token i iff i <= j < subtree_end[i] (docs/math.md).
///   q [T, H, D], k [T, K, D], v [T, K, D] of one dtype (float64, float32, bfloat16); H a multiple of K:
///   query head h reads key head h / (H / K). subtree_end [T] int32 on the same device: one past the last
///   token of the subtree of the token's node.
/// Returns [T, H, D] of the same dtype: softmax(softmax_scale q k^T) v. Scores, their log-sum-exp (natural
/// log) and sums over pieces are kept in float32 (float64 for float64). Deterministic.
/// Registered as torch.ops.espalier.tree_attention(q, k, v, subtree_end, softmax_scale) -> (out, lse [H, T]).
/// Throws on mismatched shapes or dtypes and where subtree_end is not that of a forest in preorder.
at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& subtree_end, double softmax_scale);

}  // namespace espalier
