// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/reference.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "espalier/ops/checks.h"
#include "espalier/ops/paths.h"

namespace espalier::reference {

at::Tensor visibility_mask(const at::Tensor& subtree_end) {
  const at::Tensor token = at::arange(subtree_end.size(0), subtree_end.options());
  const at::Tensor row = token.unsqueeze(1);
  return row.ge(token).logical_and(row.lt(subtree_end));
}

namespace {

/// [T, S_0 + S_1 + ...] bool: which context keys each query sees.
at::Tensor context_mask(const at::Tensor& q, const AttentionContext& context) {
  std::vector<at::Tensor> masks;
  for (const at::Tensor& segment : context.k) {
    masks.push_back(at::zeros({q.size(0), segment.size(0)}, q.options().dtype(at::kBool)));
  }
  for (int64_t p = 0; p < context.blocks.size(0); ++p) {
    const auto number = [&](int64_t i) { return context.blocks[p][i].item<int64_t>(); };
    masks[number(0)].slice(0, number(3), number(4)).slice(1, number(1), number(2)).fill_(true);
  }
  return at::cat(masks, 1);
}

/// [S_0 + S_1 + ... + T]: the position of every key, anything for keys that nobody sees.
at::Tensor key_positions(const ForestTokens& tokens, const AttentionContext& context) {
  std::vector<at::Tensor> positions;
  for (const at::Tensor& segment : context.k) {
    positions.push_back(at::zeros({segment.size(0)}, tokens.position.options()));
  }
  for (int64_t p = 0; !positions.empty() && p < context.blocks.size(0); ++p) {
    const auto number = [&](int64_t i) { return context.blocks[p][i].item<int64_t>(); };
    for (int64_t key = number(1); key < number(2); ++key) {
      positions[number(0)][key] = context.positions[p].item<int64_t>() + key - number(1);
    }
  }
  positions.push_back(tokens.position);
  return at::cat(positions);
}

}  // namespace

at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const ForestTokens& tokens, const AttentionOptions& options,
                          const AttentionContext& context) {
  detail::check_tree_attention(q, k, v, tokens.subtree_end);
  at::Tensor keys = k, values = v, visible = visibility_mask(tokens.subtree_end);
  if (!context.k.empty()) {
    keys = at::cat({at::cat(context.k), k});
    values = at::cat({at::cat(context.v), v});
    visible = at::cat({context_mask(q, context), visible}, 1);
  }
  if (options.sliding_window > 0) {
    const at::Tensor distance = tokens.position.unsqueeze(1) - key_positions(tokens, context);
    visible = visible.logical_and(distance.lt(options.sliding_window));
  }
  const int64_t group = q.size(1) / k.size(1);
  const at::Tensor q_HTD = q.transpose(0, 1);
  const at::Tensor k_HSD = keys.transpose(0, 1).repeat_interleave(group, 0);
  const at::Tensor v_HSD = values.transpose(0, 1).repeat_interleave(group, 0);
  const at::Tensor scores = q_HTD.matmul(k_HSD.transpose(1, 2))
                                .mul(options.softmax_scale)
                                .masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity());
  if (!options.sinks.defined()) return scores.softmax(-1).matmul(v_HSD).transpose(0, 1);
  const at::Tensor sinks = options.sinks.to(q.scalar_type()).view({-1, 1, 1}).expand({-1, q.size(0), 1});
  const at::Tensor weights = at::cat({scores, sinks}, -1).softmax(-1).slice(-1, 0, keys.size(0));
  return weights.matmul(v_HSD).transpose(0, 1);
}

at::Tensor edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target) {
  detail::check_edge_logprobs(hidden, weight, edge_row, edge_target);
  const at::Tensor logits = hidden.matmul(weight.t());
  const at::Tensor logprobs = logits.log_softmax(-1, detail::accumulator_dtype(hidden.scalar_type()));
  return logprobs.index({edge_row, edge_target});
}

EdgeDistribution edge_distribution(const at::Tensor& hidden, const at::Tensor& weight,
                                   const at::Tensor& edge_row, const at::Tensor& edge_target,
                                   const LogitTransform& transform) {
  detail::check_edge_logprobs(hidden, weight, edge_row, edge_target);
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

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  detail::check_rms_norm(x, {}, weight);
  const at::Tensor wide = x.to(detail::accumulator_dtype(x.scalar_type()));
  const at::Tensor inverse_rms = at::rsqrt(wide.square().mean({-1}, /*keepdim=*/true).add(eps));
  return (wide * inverse_rms).to(x.scalar_type()) * weight;
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  detail::check_rotary(x, cos, sin);
  const std::vector<at::Tensor> halves = x.to(cos.scalar_type()).chunk(2, -1);
  const at::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
  return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1).to(x.scalar_type());
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  detail::check_swiglu(gate, up);
  return at::silu(gate) * up;
}

namespace {

/// The places of the `count` largest of `scores` [N], ascending.
at::Tensor places_of_largest(const at::Tensor& scores, int64_t count) {
  return std::get<0>(std::get<1>(scores.topk(count)).sort());
}

at::Tensor without_other_groups(const at::Tensor& scores, const RouterOptions& options) {
  std::vector<at::Tensor> sums;
  const std::vector<at::Tensor> groups = scores.chunk(options.num_groups);
  for (const at::Tensor& group : groups) sums.push_back(std::get<0>(group.topk(2)).sum());
  const at::Tensor best = places_of_largest(at::stack(sums), options.num_best_groups);
  std::vector<at::Tensor> kept;
  for (int64_t i = 0; i < options.num_groups; ++i) {
    const bool is_best = best.eq(i).any().item<bool>();
    kept.push_back(is_best ? groups[i] : at::full_like(groups[i], -std::numeric_limits<double>::infinity()));
  }
  return at::cat(kept);
}

}  // namespace

Routing route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
              const RouterOptions& options) {
  detail::check_route(logits, correction_bias, options);
  std::vector<at::Tensor> weights, experts;
  for (const at::Tensor& token : logits.unbind()) {
    at::Tensor scores = options.sigmoid ? 1 / (1 + at::exp(-token)) : token.softmax(0);
    if (options.softmax_over_chosen) scores = token;
    at::Tensor choice = correction_bias ? scores + *correction_bias : scores;
    if (options.num_groups > 1) choice = without_other_groups(choice, options);
    experts.push_back(places_of_largest(choice, options.top_k));
    at::Tensor chosen = scores.index_select(0, experts.back());
    if (options.softmax_over_chosen) chosen = chosen.softmax(0);
    if (options.normalise) chosen = chosen / (chosen.sum() + 1e-20);
    weights.push_back(chosen * options.scaling);
  }
  return {at::stack(weights), at::stack(experts)};
}

namespace {

/// What an expert makes of one token [C].
at::Tensor expert_output(const ExpertWeights& experts, int64_t expert, const at::Tensor& token) {
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

}  // namespace

at::Tensor moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts) {
  detail::check_moe(x, routing);
  detail::check_moe_experts(x, experts);
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

namespace {

/// The W rows up to token t on its path, oldest first: of tokens, of a tail, or zeros.
std::vector<at::Tensor> rows_up_to(const CausalConv1d& given, int64_t t) {
  const int64_t taps = given.weight.size(1);
  std::vector<at::Tensor> rows{given.x[t]};
  while (static_cast<int64_t>(rows.size()) < taps) {
    const int32_t before = t < 0 ? detail::kPathBegins : given.prev[t].item<int32_t>();
    const int64_t context = detail::context_of(before);
    if (context >= 0) {
      for (int64_t row = taps - 2; row >= 0; --row) rows.push_back(given.tails[context][row]);
    } else {
      rows.push_back(before < 0 ? at::zeros_like(given.x[0]) : given.x[before]);
    }
    t = before < 0 ? -1 : before;
  }
  rows.resize(taps);
  return {rows.rbegin(), rows.rend()};
}

}  // namespace

at::Tensor causal_conv1d(const CausalConv1d& given) {
  const auto dtype = detail::accumulator_dtype(given.x.scalar_type());
  std::vector<at::Tensor> outs;
  for (int64_t t = 0; t < given.x.size(0); ++t) {
    const at::Tensor rows = at::stack(rows_up_to(given, t), 1).to(dtype);  // [C, W]
    at::Tensor sum = (rows * given.weight.to(dtype)).sum({1});
    if (given.bias.defined()) sum = sum + given.bias.to(dtype);
    outs.push_back(given.silu ? at::silu(sum) : sum);
  }
  return at::stack(outs).to(given.x.scalar_type());
}

at::Tensor causal_conv1d_tails(const CausalConv1d& given, const at::Tensor& ends) {
  const int64_t history = given.weight.size(1) - 1;
  if (history == 0) return at::zeros({ends.size(0), 0, given.x.size(1)}, given.x.options());
  std::vector<at::Tensor> tails;
  for (int64_t e = 0; e < ends.size(0); ++e) {
    std::vector<at::Tensor> rows = rows_up_to(given, ends[e].item<int64_t>());
    rows.erase(rows.begin());
    tails.push_back(at::stack(rows));
  }
  return at::stack(tails);
}

namespace {

/// The state before a token: of the token before on its path, of a context, or zeros of the shape.
at::Tensor state_before(int32_t before, const std::vector<at::Tensor>& states, const at::Tensor& contexts,
                        const at::Tensor& zeros) {
  if (before >= 0) return states[before];
  const int64_t context = detail::context_of(before);
  return context >= 0 ? contexts[context] : zeros;
}

at::Tensor states_at(const at::Tensor& ends, const std::vector<at::Tensor>& states) {
  std::vector<at::Tensor> wanted;
  for (int64_t e = 0; e < ends.size(0); ++e) wanted.push_back(states[ends[e].item<int64_t>()]);
  return wanted.empty() ? at::zeros({0}, states[0].options()) : at::stack(wanted);
}

}  // namespace

GatedDeltaOutput gated_delta_rule(const GatedDeltaRule& given) {
  const auto dtype = given.g.scalar_type();
  const int64_t group = given.v.size(1) / given.q.size(1);
  const auto unit = [&](const at::Tensor& x) {
    const at::Tensor wide = x.to(dtype);
    return wide / (wide.square().sum({-1}, /*keepdim=*/true) + 1e-6).sqrt();
  };
  std::vector<at::Tensor> states, outs;
  for (int64_t t = 0; t < given.q.size(0); ++t) {
    const at::Tensor q = unit(given.q[t]).repeat_interleave(group, 0).unsqueeze(2);  // [H, Dk, 1]
    const at::Tensor k = unit(given.k[t]).repeat_interleave(group, 0).unsqueeze(2);
    const at::Tensor v = given.v[t].to(dtype).unsqueeze(1);  // [H, 1, Dv]
    const at::Tensor zeros = at::zeros({v.size(0), k.size(1), v.size(2)}, given.g.options());
    const at::Tensor state = state_before(given.prev[t].item<int32_t>(), states, given.states, zeros) *
                             given.g[t].exp().view({-1, 1, 1});
    const at::Tensor update = given.beta[t].view({-1, 1, 1}) * (v - (state * k).sum({1}, true));
    states.push_back(state + k * update);
    outs.push_back((states.back() * q).sum({1}) / std::sqrt(static_cast<double>(k.size(1))));
  }
  return {at::stack(outs).to(given.q.scalar_type()), states_at(given.ends, states)};
}

SsmScanOutput ssm_scan(const SsmScan& given) {
  const auto dtype = given.dt.scalar_type();
  const int64_t repeat = given.x.size(1) / given.b.size(1);
  std::vector<at::Tensor> states, outs;
  for (int64_t t = 0; t < given.x.size(0); ++t) {
    const at::Tensor x = given.x[t].to(dtype);                                            // [H, P]
    const at::Tensor b = given.b[t].to(dtype).repeat_interleave(repeat, 0).unsqueeze(2);  // [H, N, 1]
    const at::Tensor c = given.c[t].to(dtype).repeat_interleave(repeat, 0).unsqueeze(2);
    const at::Tensor dt = given.dt[t].view({-1, 1, 1});
    const at::Tensor zeros = at::zeros({x.size(0), b.size(1), x.size(1)}, given.dt.options());
    const at::Tensor before = state_before(given.prev[t].item<int32_t>(), states, given.states, zeros);
    states.push_back(before * (dt * given.a.view({-1, 1, 1})).exp() + dt * b * x.unsqueeze(1));
    at::Tensor out = (states.back() * c).sum({1});
    if (given.d.defined()) out = out + given.d.unsqueeze(1) * x;
    outs.push_back(out);
  }
  return {at::stack(outs).to(given.x.scalar_type()), states_at(given.ends, states)};
}

}  // namespace espalier::reference
