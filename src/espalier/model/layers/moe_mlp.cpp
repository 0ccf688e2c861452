// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/moe_mlp.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "espalier/model/routes.h"
#include "espalier/ops/moe/moe.h"

namespace espalier {

MoeMlp::MoeMlp(const MoeSpec& spec, const NamedParameters& parameters, const NamedParameters& buffers)
    : spec_(spec), gate_(parameters.at("mlp.gate.weight")) {
  if (spec.correction_bias) correction_bias_ = buffers.at("mlp.gate.e_score_correction_bias");
  for (int64_t i = 0; i < spec.num_experts; ++i) {
    experts_.emplace_back(parameters, "mlp.experts." + std::to_string(i));
  }
  if (spec.shared_intermediate_size > 0) shared_experts_.emplace(parameters, "mlp.shared_experts");
}

at::Tensor MoeMlp::forward(const at::Tensor& input) const {
  RECORD_USER_SCOPE("mlp");
  const RouterOptions options{.top_k = spec_.num_experts_per_tok,
                              .sigmoid = spec_.scores == RouterScores::kSigmoid,
                              .normalise = spec_.norm_topk_prob,
                              .scaling = spec_.routed_scaling_factor,
                              .num_groups = spec_.n_group,
                              .num_best_groups = spec_.topk_group};
  const Routing routing =
      route(accumulating::unrounded_linear(input, gate_), correction_bias_, options, next_route());
  record_route(routing.experts);
  const at::Tensor output =
      moe(input, routing, spec_.num_experts,
          [&](int64_t expert, const at::Tensor& rows) { return experts_[expert].forward(rows); });
  return shared_experts_ ? output + shared_experts_->forward(input) : output;
}

}  // namespace espalier
