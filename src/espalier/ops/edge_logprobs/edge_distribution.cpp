// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/edge_logprobs/edge_distribution.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <cmath>

#include "espalier/ops/checks.h"
#include "espalier/ops/dispatch.h"
#include "espalier/ops/edge_logprobs/distribution_arguments.h"

namespace espalier {
namespace {

using detail::find_op;
using detail::if_defined;
using detail::meta_like;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using Results = detail::DistributionResults;
using Gradients = detail::DistributionGradients;

Results call_forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                     const at::Tensor& edge_target, const OptionalTensor& bias,
                     const OptionalTensor& edge_temperature, double temperature, double logit_scale,
                     double softcap) {
  static const auto op = find_op<decltype(call_forward)>("espalier::edge_distribution");
  return op.call(hidden, weight, edge_row, edge_target, bias, edge_temperature, temperature, logit_scale,
                 softcap);
}

Gradients call_backward(const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy,
                        const at::Tensor& lse, const at::Tensor& mean, const at::Tensor& hidden,
                        const at::Tensor& weight, const at::Tensor& edge_row, const at::Tensor& edge_target,
                        const OptionalTensor& bias, const OptionalTensor& edge_temperature,
                        double temperature, double logit_scale, double softcap,
                        std::array<bool, 3> output_mask) {
  static const auto op = find_op<decltype(call_backward)>("espalier::edge_distribution_backward");
  return op.call(grad_logprobs, grad_entropy, lse, mean, hidden, weight, edge_row, edge_target, bias,
                 edge_temperature, temperature, logit_scale, softcap, output_mask);
}

class Distribution : public torch::autograd::Function<Distribution> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                               const at::Tensor& edge_row, const at::Tensor& edge_target,
                               const OptionalTensor& bias, const OptionalTensor& edge_temperature,
                               double temperature, double logit_scale, double softcap) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [logprobs, entropy, lse, mean] = call_forward(hidden, weight, edge_row, edge_target, bias,
                                                       edge_temperature, temperature, logit_scale, softcap);
    ctx->save_for_backward({hidden, weight, edge_row, edge_target, bias.value_or(at::Tensor()),
                            edge_temperature.value_or(at::Tensor()), lse, mean});
    ctx->saved_data["temperature"] = temperature;
    ctx->saved_data["logit_scale"] = logit_scale;
    ctx->saved_data["softcap"] = softcap;
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->mark_non_differentiable({lse, mean});
    ctx->set_materialize_grads(false);
    return {logprobs, entropy, lse, mean};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(9);
    const variable_list saved = ctx->get_saved_variables();
    const auto number = [&](const char* name) { return ctx->saved_data[name].toDouble(); };
    // Inputs are numbered without those that were left out.
    const bool wants_bias = ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(4);
    auto [hidden, weight, bias] = call_backward(
        if_defined(grads[0]), if_defined(grads[1]), saved[6], saved[7], saved[0], saved[1], saved[2],
        saved[3], if_defined(saved[4]), if_defined(saved[5]), number("temperature"), number("logit_scale"),
        number("softcap"), {ctx->needs_input_grad(0), ctx->needs_input_grad(1), wants_bias});
    return {hidden, weight, {}, {}, bias, {}, {}, {}, {}};
  }
};

Results forward_autograd(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target, const OptionalTensor& bias,
                         const OptionalTensor& edge_temperature, double temperature, double logit_scale,
                         double softcap) {
  TORCH_CHECK(!edge_temperature || !edge_temperature->requires_grad(),
              "edge_distribution: expected an edge_temperature that needs no gradient (there is none): "
              "detach it");
  const variable_list results = Distribution::apply(hidden, weight, edge_row, edge_target, bias,
                                                    edge_temperature, temperature, logit_scale, softcap);
  return {results[0], results[1], results[2], results[3]};
}

Results forward_meta(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                     const at::Tensor& edge_target, const OptionalTensor& bias,
                     const OptionalTensor& edge_temperature, double temperature, double logit_scale,
                     double softcap) {
  detail::check_edge_distribution(
      {hidden, weight, edge_row, edge_target, bias, edge_temperature, temperature, logit_scale, softcap});
  const auto options = hidden.options().dtype(detail::accumulator_dtype(hidden.scalar_type()));
  const c10::SymInt edges = edge_row.sym_size(0);
  return {at::empty_symint({edges}, options), at::empty_symint({edges}, options),
          at::empty_symint({edges}, options.dtype(at::kDouble)),
          at::empty_symint({edges}, options.dtype(at::kDouble))};
}

Gradients backward_meta(const OptionalTensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                        const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor&,
                        const at::Tensor&, const OptionalTensor& bias, const OptionalTensor&, double, double,
                        double, std::array<bool, 3> output_mask) {
  const auto if_wanted = [](bool wanted, const at::Tensor& tensor) {
    return wanted ? meta_like(tensor) : at::Tensor();
  };
  return {if_wanted(output_mask[0], hidden), if_wanted(output_mask[1], weight),
          bias ? if_wanted(output_mask[2], *bias) : at::Tensor()};
}

}  // namespace

void detail::check_edge_distribution(const DistributionArguments& given) {
  const char* op = "edge_distribution";
  const at::Tensor& hidden = given.hidden;
  check_edge_logprobs(hidden, given.weight, given.edge_row, given.edge_target);
  TORCH_CHECK(!given.bias || (given.bias->dim() == 1 && given.bias->sym_size(0) == given.weight.sym_size(0) &&
                              given.bias->scalar_type() == hidden.scalar_type() &&
                              given.bias->device() == hidden.device()),
              op, ": expected bias [", given.weight.sym_size(0), "] ", hidden.scalar_type(), " on ",
              hidden.device(), ", received ", given.bias->sym_sizes(), " ", given.bias->scalar_type(), " on ",
              given.bias->device());
  const auto& each = given.edge_temperature;
  const at::ScalarType sums = accumulator_dtype(hidden.scalar_type());
  TORCH_CHECK(!each || (each->dim() == 1 && each->sym_size(0) == given.edge_row.sym_size(0) &&
                        each->scalar_type() == sums && each->device() == hidden.device()),
              op, ": expected edge_temperature [", given.edge_row.sym_size(0), "] ", sums, " on ",
              hidden.device(), ", received ", each->sym_sizes(), " ", each->scalar_type(), " on ",
              each->device());
  TORCH_CHECK(std::isfinite(given.temperature) && given.temperature > 0, op,
              ": temperature must be above 0, received ", given.temperature);
  TORCH_CHECK(std::isfinite(given.logit_scale), op, ": logit_scale must be finite, received ",
              given.logit_scale);
  TORCH_CHECK(std::isfinite(given.softcap) && given.softcap >= 0, op,
              ": softcap must be above 0, or 0 for none, received ", given.softcap);
}

EdgeDistribution edge_distribution(const at::Tensor& hidden, const at::Tensor& weight,
                                   const at::Tensor& edge_row, const at::Tensor& edge_target,
                                   const LogitTransform& transform) {
  auto [logprobs, entropy, lse, mean] =
      call_forward(hidden, weight, edge_row, edge_target, if_defined(transform.bias),
                   if_defined(transform.edge_temperature), transform.temperature, transform.logit_scale,
                   transform.softcap);
  return {logprobs, entropy};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("edge_distribution", &forward_autograd);
  m.impl("edge_distribution_backward",
         torch::autograd::autogradNotImplementedFallback());  // no double backward
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("edge_distribution", &forward_meta);
  m.impl("edge_distribution_backward", &backward_meta);
}

}  // namespace espalier
