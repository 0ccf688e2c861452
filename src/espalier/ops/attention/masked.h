// SPDX-License-Identifier: Apache-2.0
// tree_attention by chunks of queries with a mask: for every dtype, head dimension and device. Slow.
#pragma once

#include "espalier/ops/attention/arguments.h"

namespace espalier::masked_chunks {

/// Maximum bytes of scores per chunk of queries (at least one query); backward holds twice as many, thrice
/// with a softcap.
inline constexpr int64_t kScoreBytes = int64_t{256} << 20;

/// espalier::tree_attention and espalier::tree_attention_backward (tree_attention.h) on the device of the
/// arguments, computed in float32 (float64 for float64); not differentiable. Deterministic. Does not
/// synchronise with the device, except to copy context blocks, so subtree_end is not checked. Throws
/// InputError on invalid context blocks.
detail::TreeAttentionResults tree_attention(const detail::TreeAttentionArguments& arguments,
                                            int64_t score_bytes = kScoreBytes);

detail::TreeAttentionGradients tree_attention_backward(const detail::TreeAttentionArguments& arguments,
                                                       const at::Tensor& grad_out, const at::Tensor& lse,
                                                       int64_t score_bytes = kScoreBytes);

}  // namespace espalier::masked_chunks
