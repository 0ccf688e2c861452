// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts, computed token by token, from ATen operators; autograd differentiates it.
#pragma once

#include <ATen/ATen.h>

#include <limits>

#include "espalier/ops/moe/moe.h"
#include "tests/ops/elementwise/reference.h"

namespace espalier::reference {

/// Indices of the `count` largest of `scores` [N], ascending.
inline at::Tensor largest_indices(const at::Tensor& scores, int64_t count) {
  return std::get<0>(std::get<1>(scores.topk(count)).sort());
}

inline at::Tensor without_other_groups(const at::Tensor& scores, const RouterOptions& options) {
  std::vector<at::Tensor> sums;
  const std::vector<at::Tensor> groups = scores.chunk(options.num_groups);
  for (const at::Tensor& group : groups) sums.push_back(std::get<0>(group.topk(2)).sum());
  const at::Tensor best = largest_indices(at::stack(sums), options.num_best_groups);
  std::vector<at::Tensor> kept;
  for (int64_t i = 0; i < options.num_groups; ++i) {
    const bool is_best = best.eq(i).any().item<bool>();
    kept.push_back(is_best ? groups[i] : at::full_like(groups[i], -std::numeric_limits<double>::infinity()));
  }
  return at::cat(kept);
}

inline Routing route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
                     const RouterOptions& options) {
  std::vector<at::Tensor> weights, experts;
  for (const at::Tensor& token : logits.unbind()) {
    at::Tensor scores = options.sigmoid ? 1 / (1 + at::exp(-token)) : token.softmax(0);
    if (options.softmax_over_chosen) scores = token;
    at::Tensor choice = correction_bias ? scores + *correction_bias : scores;
    if (options.num_groups > 1) choice = without_other_groups(choice, options);
    experts.push_back(largest_indices(choice, options.top_k));
    at::Tensor chosen = scores.index_select(0, experts.back());
    if (options.softmax_over_chosen) chosen = chosen.softmax(0);
    if (options.normalise) chosen = chosen / (chosen.sum() + 1e-20);
    weights.push_back(chosen * options.scaling);
  }
  return {at::stack(weights), at::stack(experts)};
}

/// The output of an expert for one token [C].
inline at::Tensor expert_output(const ExpertWeights& experts, int64_t expert, const at::Tensor& token) {
  at::Tensor gate_up = experts.gate_up[expert], down = experts.down[expert];
  if (experts.clamped) {
    gate_up = gate_up.t();
    down = down.t();
  }
  at::Tensor inner = gate_up.mv(token);
  if (experts.gate_up_bias.defined()) inner = inner + experts.gate_up_bias[expert];
  at::Tensor activated;
  if (experts.clamped) {
    const auto [alpha, limit] = *experts.clamped;
    const at::Tensor pairs = inner.view({-1, 2});
    const at::Tensor gate = pairs.select(1, 0).clamp_max(limit), up = pairs.select(1, 1).clamp(-limit, limit);
    activated = (up + 1) * (gate * at::sigmoid(alpha * gate));
  } else {
    activated = swiglu(inner.chunk(2)[0], inner.chunk(2)[1]);
  }
  const at::Tensor output = down.mv(activated);
  return experts.down_bias.defined() ? output + experts.down_bias[expert] : output;
}

inline at::Tensor moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts) {
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < x.size(0); ++t) {
    at::Tensor sum = at::zeros({x.size(1)}, routing.weights.options());
    for (int64_t j = 0; j < routing.experts.size(1); ++j) {
      const auto expert = routing.experts[t][j].item<int64_t>();
      sum = sum + routing.weights[t][j] * expert_output(experts, expert, x[t]);
    }
    outputs.push_back(sum.to(x.scalar_type()));
  }
  return at::stack(outputs);
}

}  // namespace espalier::reference
