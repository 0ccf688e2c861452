// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/mixers.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cmath>

#include "espalier/ops/elementwise/activations.h"
#include "espalier/ops/elementwise/elementwise.h"

namespace espalier {

AttentionLayer::AttentionLayer(const AttentionSpec& spec, const NamedParameters& parameters,
                               const Options& options)
    : spec_(spec), options_(options), o_(parameters.projection(spec.name + ".o_proj")) {
  using Names = std::vector<const char*>;
  for (const char* name : spec.fused ? Names{"qkv_proj"} : Names{"k_proj", "v_proj", "q_proj"})
    in_.push_back(parameters.projection(spec.name + "." + name));
  if (spec.sinks) sinks_ = parameters.at(spec.name + ".sinks");
  if (!spec.query_key_norm) return;
  q_norm_ = parameters.at(spec.name + ".q_norm.weight");
  k_norm_ = parameters.at(spec.name + ".k_norm.weight");
}

AttentionLayer::Projected AttentionLayer::project(const at::Tensor& hidden, bool context_only) const {
  if (spec_.fused) {
    const int64_t query = spec_.num_attention_heads * spec_.head_dim;
    const int64_t key = spec_.num_key_value_heads * spec_.head_dim;
    const std::vector<at::Tensor> parts =
        accumulating::linear(hidden, in_[0]).split_with_sizes({query, key, key}, -1);
    return {parts[0], parts[1], parts[2].contiguous()};  // a view would keep all three
  }
  const std::vector<accumulating::Projection> used(in_.begin(), in_.end() - (context_only ? 1 : 0));
  const std::vector<at::Tensor> parts = accumulating::linears(hidden, used);
  return {context_only ? at::Tensor() : parts[2], parts[0], parts[1]};
}

at::Tensor AttentionLayer::rotated_heads(at::Tensor heads, const std::optional<at::Tensor>& norm,
                                         const PositionTables& tables) const {
  if (norm) {
    const at::Tensor normed = spec_.query_key_norm_over_heads ? heads.flatten(1) : heads;
    heads = accumulating::rms_norm(normed, *norm, options_.rms_norm_eps, options_.zero_centered_norm)
                .view(heads.sizes());
  }
  if (!spec_.rotary) return heads;
  // Scores are the same whatever the order of elements, if queries and keys have the same.
  if (spec_.rotary_interleaved) heads = heads.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
  const at::Tensor &cos = tables.at(options_.first_table), &sin = tables.at(options_.first_table + 1);
  if (spec_.rotary_dim == 0) return rotary(heads, cos, sin);
  const at::Tensor rotated = rotary(heads.narrow(-1, 0, spec_.rotary_dim), cos, sin);
  return at::cat({rotated, heads.slice(-1, spec_.rotary_dim)}, -1);
}

LayerOutput AttentionLayer::forward(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                                    const SequenceOps& sequence, const at::Tensor& rows) const {
  RECORD_USER_SCOPE("attention");
  const bool context_only = rows.defined() && rows.numel() == 0;
  const Projected projected = project(hidden, context_only);
  const auto heads = [&](const at::Tensor& x, int64_t dim) { return x.view({x.size(0), -1, dim}); };
  const int64_t dim = spec_.head_dim;
  const at::Tensor k = rotated_heads(heads(projected.k, dim), k_norm_, tables);
  const at::Tensor v = heads(projected.v, dim);
  if (context_only) return {{}, {k, v}};
  const at::Tensor queries = heads(projected.q, spec_.output_gate ? 2 * dim : dim);
  const at::Tensor q = rotated_heads(queries.narrow(-1, 0, dim), q_norm_, tables);
  const double scale = std::pow(static_cast<double>(spec_.head_dim), -0.5);
  const AttentionOptions options{
      .softmax_scale = spec_.attention_multiplier > 0 ? spec_.attention_multiplier : scale,
      .sliding_window = spec_.sliding_window,
      .sinks = sinks_.defined() ? accumulating::unrounded(sinks_) : sinks_,
      .softcap = spec_.softcap};
  at::Tensor out = sequence.attention(index, q, k, v, options);
  TORCH_CHECK(out.sizes() == q.sizes(), "attention of layer ", index, " returned shape ", out.sizes(),
              ", expected ", q.sizes());
  if (spec_.output_gate) out = out * espalier::sigmoid(queries.narrow(-1, dim, dim));
  out = out.reshape({q.size(0), -1});
  if (rows.defined()) out = out.index_select(0, rows);
  return {accumulating::linear(out, o_), {k, v}};
}

}  // namespace espalier
