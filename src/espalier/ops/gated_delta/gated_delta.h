// SPDX-License-Identifier: Apache-2.0
// The gated delta rule along the paths of a forest.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "espalier/ops/argument.h"
#include "espalier/ops/chunk_scan/chunk_tree.h"

namespace espalier {

/// The arguments of gated_delta_rule.
struct GatedDeltaRule {
  at::Tensor q, k;  // [T, K, Dk] float64, float32 or bfloat16
  at::Tensor v;     // [T, H, Dv] as q; H a multiple of K: head h reads q and k of head h / (H / K)
  at::Tensor g;  // [T, H] logarithms of decays, <= 0, in the accumulator dtype (float32; float64 for float64)
  at::Tensor beta;      // [T, H] in the accumulator dtype
  at::Tensor prev;      // [T] int32 on the CPU: paths.h; contexts index `states`
  TensorOrNone states;  // [N, H, Dk, Dv] in the accumulator dtype, from which paths continue
  at::Tensor ends;      // [E] int64 on the CPU: tokens whose states are returned
  int64_t chunk_size = detail::kChunkTokens;  // a power of two

  static auto all(auto& given) {
    return std::tie(given.q, given.k, given.v, given.g, given.beta, given.prev, given.states, given.ends,
                    given.chunk_size);
  }
};

struct GatedDeltaOutput {
  at::Tensor out;     // [T, H, Dv] of the dtype of q
  at::Tensor states;  // [E, H, Dk, Dv] in the accumulator dtype, after each of `ends`
};

/// The gated delta rule (Yang et al., "Gated Delta Networks", 2024, equation 10), of every head, with the
/// state S' of the previous token on the path (0 at the start):
///   S = exp(g) S' + k u^T,  u = beta (v - (exp(g) S')^T k),  out = S^T q / sqrt(Dk),
/// where q and k are first divided by sqrt(|.|^2 + 1e-6): what Transformers computes for Qwen3-Next and
/// Qwen3.5. Differentiable in q, k, v, g, beta and states, through both results. Computed in chunks
/// (docs/math.md) in the accumulator dtype. Backward saves only the inputs and recomputes the chunks.
/// Deterministic (on CUDA if deterministic algorithms are enabled). Registered as
/// torch.ops.espalier.gated_delta_rule(q, k, v, g, beta, prev, states, ends, chunk_size) -> (out,
/// end_states). Throws on mismatched shapes, dtypes or devices, and on invalid prev or ends.
GatedDeltaOutput gated_delta_rule(const GatedDeltaRule& given);

}  // namespace espalier
