// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/mlps.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <string>
#include <vector>

#include "espalier/ops/elementwise/activations.h"

namespace espalier {
namespace {

accumulating::StackedProjections stacked(const NamedParameters& parameters, const std::string& name) {
  return {parameters.at(name), parameters.at(name + "_bias")};
}

/// The experts of gpt_oss: down(clamped_swiglu(gate_up(x))) with biases, each fused over the experts of a
/// layer.
class ClampedExperts {
 public:
  /// Uses the parameters mlp.experts.gate_up_proj, mlp.experts.down_proj and their biases.
  ClampedExperts(const ClampedSwiglu& activation, const NamedParameters& parameters)
      : activation_(activation),
        gate_up_(stacked(parameters, "mlp.experts.gate_up_proj")),
        down_(stacked(parameters, "mlp.experts.down_proj")) {}

  /// One expert: [R, hidden_size] -> [R, hidden_size]
  at::Tensor forward(int64_t expert, const at::Tensor& input) const {
    const at::Tensor inner = accumulating::stacked_linear(input, gate_up_, expert);
    const auto [alpha, limit] = activation_;
    return accumulating::stacked_linear(clamped_swiglu(inner, alpha, limit), down_, expert);
  }

 private:
  ClampedSwiglu activation_;
  accumulating::StackedProjections gate_up_, down_;
};

ExpertFunction make_experts(const MoeSpec& spec, const NamedParameters& parameters) {
  if (spec.clamped_swiglu) {
    return [experts = ClampedExperts(*spec.clamped_swiglu, parameters)](
               int64_t expert, const at::Tensor& rows) { return experts.forward(expert, rows); };
  }
  std::vector<DenseMlp> mlps;
  for (int64_t i = 0; i < spec.num_experts; ++i) {
    const std::string name = spec.experts_name + "." + std::to_string(i);
    mlps.emplace_back(parameters, DenseMlpSpec{.names = spec.names, .name = name});
  }
  return [experts = std::move(mlps)](int64_t expert, const at::Tensor& rows) {
    return experts[expert].forward(rows);
  };
}

}  // namespace

MoeMlp::MoeMlp(const MoeSpec& spec, const NamedParameters& parameters, const NamedParameters& buffers,
               const RouterPlace& place)
    : spec_(spec),
      place_(place),
      router_(parameters.projection(spec.router_name)),
      experts_(make_experts(spec, parameters)) {
  if (spec.correction_bias) correction_bias_ = buffers.at(spec.router_name + ".e_score_correction_bias");
  if (spec.shared_intermediate_size > 0)
    shared_experts_.emplace(parameters, DenseMlpSpec{.names = spec.names, .name = spec.shared_name});
  if (spec.shared_expert_gate) shared_gate_ = parameters.projection("mlp.shared_expert_gate");
}

std::optional<at::Tensor> MoeMlp::given_experts(const at::Tensor& routes) const {
  if (!routes.defined()) return std::nullopt;
  const int64_t top_k = spec_.num_experts_per_tok;
  const bool per_router = routes.size(1) == place_.num_routers * top_k;
  return routes.narrow(1, (per_router ? place_.router : place_.layer) * top_k, top_k);
}

at::Tensor MoeMlp::forward(const at::Tensor& input, const RouterContext& context) const {
  RECORD_USER_SCOPE("mlp");
  const RouterOptions options{.top_k = spec_.num_experts_per_tok,
                              .sigmoid = spec_.scores == RouterScores::kSigmoid,
                              .normalise = spec_.norm_topk_prob,
                              .scaling = spec_.routed_scaling_factor,
                              .num_groups = spec_.n_group,
                              .num_best_groups = spec_.topk_group,
                              .softmax_over_chosen = spec_.scores == RouterScores::kSoftmaxOverChosen};
  at::Tensor logits = accumulating::unrounded_linear(input, router_);
  if (context.statistics)
    logits = context.statistics->with_losses(logits, options.sigmoid, context.multiplicity);
  const Routing routing = route(logits, correction_bias_, options, given_experts(context.routes));
  if (context.statistics) {
    context.statistics->add(place_.router, logits, options.sigmoid, routing.experts, context.multiplicity);
  }
  if (context.record != nullptr) {
    context.record->logits.push_back(logits);
    context.record->experts.push_back(routing.experts);
  }
  const at::Tensor output = moe(input, routing, spec_.num_experts, experts_);
  if (!shared_experts_) return output;
  const at::Tensor shared = shared_experts_->forward(input);
  if (!shared_gate_) return output + shared;
  return output + espalier::sigmoid(accumulating::linear(input, *shared_gate_)) * shared;
}

}  // namespace espalier
