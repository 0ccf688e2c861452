// SPDX-License-Identifier: Apache-2.0
// The most likely tokens of the LM head's distributions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace espalier {

struct TopLogprobs {
  at::Tensor ids;       // [R, K] int64
  at::Tensor logprobs;  // [R, K] float32 (float64 for float64), natural log
};

/// The `k` largest entries of log softmax(z / temperature) over the whole vocabulary, z = hidden weight^T or
/// softcap * tanh(z / softcap), in descending order; equal logits by ascending id, so that results do not
/// depend on blocks or batch.
///   hidden [R, C] final hidden states, weight [V, C] of the same dtype (float64, float32, bfloat16); k in
///   [1, V]; temperature above 0; softcap 0: none.
/// Logits are processed in blocks like in edge_logprobs (edge_logprobs.h), and rounded to bfloat16 only if
/// products are (rounds_products in gemm/matrix_product.h). Runs without autograd. Throws on invalid
/// arguments.
TopLogprobs top_logprobs(const at::Tensor& hidden, const at::Tensor& weight, int64_t k, double temperature,
                         double softcap = 0);

}  // namespace espalier
