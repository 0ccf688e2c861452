// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/attention.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cmath>

#include "espalier/ops/elementwise/elementwise.h"

namespace espalier {

AttentionLayer::AttentionLayer(const AttentionSpec& spec, const NamedParameters& parameters,
                               double rms_norm_eps, int64_t first_table)
    : spec_(spec),
      rms_norm_eps_(rms_norm_eps),
      first_table_(first_table),
      q_(parameters.projection("self_attn.q_proj")),
      k_(parameters.projection("self_attn.k_proj")),
      v_(parameters.projection("self_attn.v_proj")),
      o_(parameters.projection("self_attn.o_proj")) {
  if (spec.sinks) sinks_ = parameters.at("self_attn.sinks");
  if (!spec.query_key_norm) return;
  q_norm_ = parameters.at("self_attn.q_norm.weight");
  k_norm_ = parameters.at("self_attn.k_norm.weight");
}

at::Tensor AttentionLayer::rotated_heads(at::Tensor projected, const std::optional<at::Tensor>& norm,
                                         const PositionTables& tables) const {
  const bool over_heads = spec_.query_key_norm_over_heads;
  if (norm && over_heads) projected = accumulating::rms_norm(projected, *norm, rms_norm_eps_);
  at::Tensor heads = projected.view({projected.size(0), -1, spec_.head_dim});
  if (norm && !over_heads) heads = accumulating::rms_norm(heads, *norm, rms_norm_eps_);
  const at::Tensor &cos = tables.at(first_table_), &sin = tables.at(first_table_ + 1);
  if (spec_.rotary_dim == 0) return rotary(heads, cos, sin);
  const at::Tensor rotated = rotary(heads.narrow(-1, 0, spec_.rotary_dim), cos, sin);
  return at::cat({rotated, heads.slice(-1, spec_.rotary_dim)}, -1);
}

LayerOutput AttentionLayer::forward(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                                    const SequenceOps& sequence, const at::Tensor& rows) const {
  RECORD_USER_SCOPE("attention");
  const bool context_only = rows.defined() && rows.numel() == 0;
  std::vector<accumulating::Projection> projections{k_, v_};
  if (!context_only) projections.push_back(q_);
  const std::vector<at::Tensor> projected = accumulating::linears(hidden, projections);
  const at::Tensor k = rotated_heads(projected[0], k_norm_, tables);
  const at::Tensor v = projected[1].view(k.sizes());
  if (context_only) return {{}, {k, v}};
  const at::Tensor q = rotated_heads(projected[2], q_norm_, tables);
  const AttentionOptions options{.softmax_scale = std::pow(static_cast<double>(spec_.head_dim), -0.5),
                                 .sliding_window = spec_.sliding_window,
                                 .sinks = sinks_};
  at::Tensor out = sequence.attention(index, q, k, v, options);
  TORCH_CHECK(out.sizes() == q.sizes(), "attention of layer ", index, " returned shape ", out.sizes(),
              ", expected ", q.sizes());
  out = out.reshape({q.size(0), -1});
  if (rows.defined()) out = out.index_select(0, rows);
  return {accumulating::linear(out, o_), {k, v}};
}

}  // namespace espalier
