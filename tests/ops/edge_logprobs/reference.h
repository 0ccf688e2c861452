// SPDX-License-Identifier: Apache-2.0
// Log-probabilities and entropies by log_softmax of the full logits, from ATen operators; autograd
// differentiates it.
#pragma once

#include <ATen/ATen.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/edge_distribution.h"
#include "espalier/ops/edge_logprobs/edge_logprobs.h"

namespace espalier::reference {

inline at::Tensor edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& edge_row, const at::Tensor& edge_target) {
  const at::Tensor logits = hidden.matmul(weight.t());
  const at::Tensor logprobs = logits.log_softmax(-1, detail::accumulator_dtype(hidden.scalar_type()));
  return logprobs.index({edge_row, edge_target});
}

inline EdgeDistribution edge_distribution(const at::Tensor& hidden, const at::Tensor& weight,
                                          const at::Tensor& edge_row, const at::Tensor& edge_target,
                                          const LogitTransform& transform) {
  at::Tensor logits = hidden.matmul(weight.t());
  if (transform.bias.defined()) logits = logits + transform.bias;
  logits = logits * transform.logit_scale;
  if (transform.softcap > 0) logits = (logits / transform.softcap).tanh() * transform.softcap;
  logits =
      logits.index({edge_row}).to(detail::accumulator_dtype(hidden.scalar_type())) / transform.temperature;
  if (transform.edge_temperature.defined()) logits = logits / transform.edge_temperature.unsqueeze(1);
  const at::Tensor logprobs = logits.log_softmax(-1);
  return {logprobs.gather(1, edge_target.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)};
}

}  // namespace espalier::reference
