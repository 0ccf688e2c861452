// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/mixers.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include "espalier/model/node_structure.h"
#include "espalier/ops/causal_conv1d/causal_conv1d.h"
#include "espalier/ops/elementwise/activations.h"
#include "espalier/ops/elementwise/elementwise.h"
#include "espalier/ops/gated_delta/gated_delta.h"

namespace espalier {

GatedDeltaLayer::GatedDeltaLayer(const GatedDeltaSpec& spec, const NamedParameters& parameters,
                                 double rms_norm_eps)
    : spec_(spec),
      rms_norm_eps_(rms_norm_eps),
      out_(parameters.projection("linear_attn.out_proj")),
      conv_(parameters.at("linear_attn.conv1d.weight")),
      dt_bias_(parameters.at("linear_attn.dt_bias")),
      a_log_(parameters.at("linear_attn.A_log")),
      norm_(parameters.at("linear_attn.norm.weight")) {
  const std::vector<const char*> names =
      spec.fused_projections ? std::vector{"qkvz", "ba"} : std::vector{"qkv", "z", "b", "a"};
  for (const char* name : names)
    in_.push_back(parameters.projection(fmt::format("linear_attn.in_proj_{}", name)));
}

std::vector<at::Tensor> GatedDeltaLayer::project(const at::Tensor& hidden) const {
  const std::vector<at::Tensor> projected = accumulating::linears(hidden, in_);
  if (!spec_.fused_projections) return projected;
  // Fused rows are grouped by key head: q, k, then v, z (b, a) of its value heads.
  const int64_t keys = spec_.linear_num_key_heads, key = spec_.linear_key_head_dim;
  const int64_t values = spec_.linear_num_value_heads / keys, value = values * spec_.linear_value_head_dim;
  const std::vector<at::Tensor> qkvz =
      projected[0].unflatten(-1, {keys, -1}).split_with_sizes({key, key, value, value}, -1);
  const std::vector<at::Tensor> ba =
      projected[1].unflatten(-1, {keys, -1}).split_with_sizes({values, values}, -1);
  const auto flat = [](const at::Tensor& x) { return x.flatten(1); };
  return {at::cat({flat(qkvz[0]), flat(qkvz[1]), flat(qkvz[2])}, -1), flat(qkvz[3]), flat(ba[0]),
          flat(ba[1])};
}

LayerOutput GatedDeltaLayer::forward(int64_t index, const at::Tensor& hidden, const PositionTables&,
                                     const SequenceOps& sequence, const at::Tensor& rows) const {
  RECORD_USER_SCOPE("gated delta");
  const std::vector<at::Tensor> projected = project(hidden);
  const Paths paths(sequence.nodes());
  const std::vector<at::Tensor> before = sequence.cut_context(index);
  const CausalConv1d convolution{.x = projected[0],
                                 .weight = accumulating::unrounded(conv_).squeeze(1),
                                 .bias = {},
                                 .prev = paths.prev,
                                 .tails = before.empty() ? at::Tensor() : before[1],
                                 .silu = true};
  const int64_t keys = spec_.key_size(), values = spec_.value_size();
  const std::vector<at::Tensor> qkv = causal_conv1d(convolution).split_with_sizes({keys, keys, values}, -1);
  const at::Tensor a_log = accumulating::unrounded(a_log_);
  const at::ScalarType dtype = a_log.scalar_type();
  const at::Tensor rate = espalier::softplus(projected[3].to(dtype) + accumulating::unrounded(dt_bias_));
  const auto heads = [](const at::Tensor& x, int64_t dim) { return x.unflatten(-1, {-1, dim}); };
  const GatedDeltaOutput mixed = gated_delta_rule({.q = heads(qkv[0], spec_.linear_key_head_dim),
                                                   .k = heads(qkv[1], spec_.linear_key_head_dim),
                                                   .v = heads(qkv[2], spec_.linear_value_head_dim),
                                                   .g = -a_log.exp() * rate,
                                                   .beta = espalier::sigmoid(projected[2].to(dtype)),
                                                   .prev = paths.prev,
                                                   .states = before.empty() ? at::Tensor() : before[0],
                                                   .ends = paths.ends});
  LayerContext context{mixed.states, causal_conv1d_tails(convolution, paths.ends)};
  if (rows.defined() && rows.numel() == 0) return {{}, std::move(context)};
  at::Tensor out = mixed.out, gate = heads(projected[1], spec_.linear_value_head_dim);
  if (rows.defined()) {
    out = out.index_select(0, rows);
    gate = gate.index_select(0, rows);
  }
  out = swiglu(gate, accumulating::rms_norm(out, norm_, rms_norm_eps_));
  return {accumulating::linear(out.flatten(1), out_), std::move(context)};
}

}  // namespace espalier
