// SPDX-License-Identifier: Apache-2.0
// The selective state space of Mamba-2 along the paths of a forest.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "espalier/ops/argument.h"
#include "espalier/ops/chunk_scan/chunk_tree.h"

namespace espalier {

/// The arguments of ssm_scan.
struct SsmScan {
  at::Tensor x;              // [T, H, P] float64, float32 or bfloat16
  at::Tensor dt;             // [T, H] steps, >= 0, in the accumulator dtype (float32; float64 for float64)
  at::Tensor a;              // [H] <= 0, in the accumulator dtype
  at::Tensor b, c;           // [T, G, N] as x; H a multiple of G: head h reads b and c of group h / (H / G)
  TensorOrNone d;            // [H] in the accumulator dtype; none: 0
  at::Tensor prev;           // [T] int32 on the CPU: paths.h; contexts index `states`
  TensorOrNone states = {};  // [M, H, N, P] in the accumulator dtype, from which paths continue
  at::Tensor ends;           // [E] int64 on the CPU: tokens whose states are returned
  int64_t chunk_size = detail::kChunkTokens;  // a power of two

  static auto all(auto& given) {
    return std::tie(given.x, given.dt, given.a, given.b, given.c, given.d, given.prev, given.states,
                    given.ends, given.chunk_size);
  }
};

struct SsmScanOutput {
  at::Tensor out;     // [T, H, P] of the dtype of x
  at::Tensor states;  // [E, H, N, P] in the accumulator dtype, after each of `ends`
};

/// The recurrence of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024, section 6) of every head, with the
/// state S' of the previous token on the path (0 at the start):
///   S = exp(dt a) S' + dt b x^T,  out = S^T c + d x.
/// States are transposed compared to Transformers' [H, P, N]; dt is after softplus and clamping.
/// Differentiable in x, dt, a, b, c, d and states, through both results. Computed in chunks (docs/math.md) in
/// the accumulator dtype. Backward saves only the inputs and recomputes the chunks. Deterministic (on CUDA if
/// deterministic algorithms are enabled). Registered as torch.ops.espalier.ssm_scan(x, dt, A, B, C, D, prev,
/// states, ends, chunk_size) -> (out, end_states). Throws on mismatched shapes, dtypes or devices, and on
/// invalid prev or ends.
SsmScanOutput ssm_scan(const SsmScan& given);

}  // namespace espalier
