// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/mixers.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cmath>
#include <vector>

#include "espalier/model/node_structure.h"
#include "espalier/ops/causal_conv1d/causal_conv1d.h"
#include "espalier/ops/elementwise/activations.h"
#include "espalier/ops/elementwise/elementwise.h"
#include "espalier/ops/ssm_scan/ssm_scan.h"

namespace espalier {

Mamba2Layer::Mamba2Layer(const SsmSpec& spec, const NamedParameters& parameters, double rms_norm_eps)
    : spec_(spec),
      rms_norm_eps_(rms_norm_eps),
      in_(parameters.projection(spec.name + ".in_proj")),
      out_(parameters.projection(spec.name + ".out_proj")),
      conv_(parameters.projection(spec.name + ".conv1d")),
      dt_bias_(parameters.at(spec.name + ".dt_bias")),
      a_log_(parameters.at(spec.name + ".A_log")),
      d_(parameters.at(spec.name + ".D")),
      norm_(parameters.at(spec.name + ".norm.weight")) {}

at::Tensor Mamba2Layer::steps(const at::Tensor& dt) const {
  const at::Tensor bias = accumulating::unrounded(dt_bias_);
  const at::Tensor positive = espalier::softplus(dt.to(bias.scalar_type()) + bias);
  if (spec_.least_time_step == 0 && std::isinf(spec_.most_time_step)) return positive;
  return positive.clamp(spec_.least_time_step, spec_.most_time_step);
}

// Normalises each group separately; the weight spans all groups.
at::Tensor Mamba2Layer::gated_norm(const at::Tensor& x, const at::Tensor& gate) const {
  const at::Tensor weight = accumulating::unrounded(norm_);
  const at::ScalarType dtype = weight.scalar_type();
  const at::Tensor gated = swiglu(gate.to(dtype), x.to(dtype)).unflatten(-1, {spec_.n_groups, -1});
  const at::Tensor ones = at::ones({gated.size(-1)}, gated.options());
  return (rms_norm(gated, ones, rms_norm_eps_).flatten(1) * weight).to(x.scalar_type());
}

LayerOutput Mamba2Layer::forward(int64_t index, const at::Tensor& hidden, const PositionTables&,
                                 const SequenceOps& sequence, const at::Tensor& rows) const {
  RECORD_USER_SCOPE("mamba2");
  const std::vector<at::Tensor> projected =
      accumulating::linear(hidden, in_)
          .split_with_sizes({spec_.inner_size(), spec_.conv_size(), spec_.num_heads}, -1);
  const Paths paths(sequence.nodes());
  const std::vector<at::Tensor> before = sequence.cut_context(index);
  const CausalConv1d convolution{
      .x = projected[1],
      .weight = accumulating::unrounded(conv_.weight).squeeze(1),
      .bias = conv_.bias.defined() ? accumulating::unrounded(conv_.bias) : at::Tensor(),
      .prev = paths.prev,
      .tails = before.empty() ? at::Tensor() : before[1],
      .silu = true};
  const int64_t state_columns = spec_.n_groups * spec_.state_size;
  const std::vector<at::Tensor> xbc =
      causal_conv1d(convolution).split_with_sizes({spec_.inner_size(), state_columns, state_columns}, -1);
  const auto parts = [](const at::Tensor& x, int64_t dim) { return x.unflatten(-1, {-1, dim}); };
  const SsmScanOutput mixed = ssm_scan({.x = parts(xbc[0], spec_.head_dim),
                                        .dt = steps(projected[2]),
                                        .a = -accumulating::unrounded(a_log_).exp(),
                                        .b = parts(xbc[1], spec_.state_size),
                                        .c = parts(xbc[2], spec_.state_size),
                                        .d = accumulating::unrounded(d_),
                                        .prev = paths.prev,
                                        .states = before.empty() ? at::Tensor() : before[0],
                                        .ends = paths.ends});
  LayerContext context{mixed.states, causal_conv1d_tails(convolution, paths.ends)};
  if (rows.defined() && rows.numel() == 0) return {{}, std::move(context)};
  at::Tensor out = mixed.out.flatten(1), gate = projected[0];
  if (rows.defined()) {
    out = out.index_select(0, rows);
    gate = gate.index_select(0, rows);
  }
  return {accumulating::linear(gated_norm(out, gate), out_), std::move(context)};
}

}  // namespace espalier
