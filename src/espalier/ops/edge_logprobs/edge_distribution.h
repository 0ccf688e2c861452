// SPDX-License-Identifier: Apache-2.0
// Log-probabilities and entropies of edges with transformed logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "espalier/ops/argument.h"

namespace espalier {

/// Transforms of logits, in this order (docs/math.md):
///   z = logit_scale (hidden weight^T + bias),  z = softcap tanh(z / softcap),  z = z / temperature.
struct LogitTransform {
  TensorOrNone bias = {};              // [V] of the dtype of weight
  TensorOrNone edge_temperature = {};  // [E] float32 (float64), above 0, in addition to `temperature`
  double temperature = 1;              // above 0
  double logit_scale = 1;              // Granite's 1 / logits_scaling
  double softcap = 0;                  // Gemma's final_logit_softcapping; 0: none

  static auto all(auto& given) {
    return std::tie(given.bias, given.edge_temperature, given.temperature, given.logit_scale, given.softcap);
  }
};

struct EdgeDistribution {
  at::Tensor logprobs;  // [E] see edge_logprobs
  at::Tensor entropy;   // [E] -sum over v of p(v) log p(v) >= 0, in nats
};

/// edge_logprobs (edge_logprobs.h) with transformed logits, and the entropy of the distribution at each edge.
/// Same hidden [R, C], weight [V, C], edge_row [E] and edge_target [E]; both results float32 (float64),
/// differentiable in hidden, weight and bias; temperatures have no gradient. Composed of ATen operators on
/// every device. Works block by block like edge_logprobs, and backward recomputes the blocks; but every edge
/// has its own row of logits, since edges of one row may have different temperatures. Peak extra memory: four
/// blocks (ops/edge_logprobs/logit_blocks.h), the hidden states of the edges [E, C], their gradient in
/// float32 (float64), and a few numbers per edge. Registered as torch.ops.espalier.edge_distribution(hidden,
/// weight, edge_row, edge_target, bias=None, edge_temperature=None, temperature=1., logit_scale=1.,
/// softcap=0.) -> (logprobs, entropy, lse [E], mean [E]), the last two float64: the log-sum-exp of z, and its
/// mean, sum over v of p(v) z(v). Throws like edge_logprobs, and on invalid options.
EdgeDistribution edge_distribution(const at::Tensor& hidden, const at::Tensor& weight,
                                   const at::Tensor& edge_row, const at::Tensor& edge_target,
                                   const LogitTransform& transform);

}  // namespace espalier
