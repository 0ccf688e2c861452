// SPDX-License-Identifier: Apache-2.0
// torch.ops.espalier.moe. How many tokens an expert has is data, so the operator is one node of traced
// graphs; its backward pass keeps the inputs alone and computes the experts again.
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "espalier/ops/dispatch.h"
#include "espalier/ops/moe/moe.h"

namespace espalier {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// The arguments of the operator moe.
struct MoeArguments {
  const at::Tensor &x, &weights, &experts, &gate_up, &down;
  const std::optional<at::Tensor>&gate_up_bias, &down_bias;
  std::optional<double> clamp_limit;
  double clamp_alpha;

  std::array<at::Tensor, 6> differentiable() const {
    const at::Tensor none;
    return {x, weights, gate_up, down, gate_up_bias.value_or(none), down_bias.value_or(none)};
  }
};

/// The operator's result from such tensors.
at::Tensor moe_of(const std::array<at::Tensor, 6>& in, const MoeArguments& given) {
  ExpertWeights weights{in[2], in[3], in[4], in[5]};
  if (given.clamp_limit) weights.clamped = {given.clamp_alpha, *given.clamp_limit};
  return moe(in[0], {in[1], given.experts}, weights);
}

at::Tensor call_moe(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& experts,
                    const at::Tensor& gate_up, const at::Tensor& down,
                    const std::optional<at::Tensor>& gate_up_bias, const std::optional<at::Tensor>& down_bias,
                    std::optional<double> clamp_limit, double clamp_alpha) {
  static const auto op = detail::find_op<decltype(call_moe)>("espalier::moe");
  return op.call(x, weights, experts, gate_up, down, gate_up_bias, down_bias, clamp_limit, clamp_alpha);
}

at::Tensor moe_forward(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& experts,
                       const at::Tensor& gate_up, const at::Tensor& down,
                       const std::optional<at::Tensor>& gate_up_bias,
                       const std::optional<at::Tensor>& down_bias, std::optional<double> clamp_limit,
                       double clamp_alpha) {
  const at::NoGradGuard no_graph;
  const MoeArguments given{x,         weights,     experts,    gate_up, down, gate_up_bias,
                           down_bias, clamp_limit, clamp_alpha};
  return moe_of(given.differentiable(), given);
}

using MoeGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

MoeGradients call_moe_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weights,
                               const at::Tensor& experts, const at::Tensor& gate_up, const at::Tensor& down,
                               const std::optional<at::Tensor>& gate_up_bias,
                               const std::optional<at::Tensor>& down_bias, std::optional<double> clamp_limit,
                               double clamp_alpha, std::array<bool, 6> output_mask) {
  static const auto op = detail::find_op<decltype(call_moe_backward)>("espalier::moe_backward");
  return op.call(grad, x, weights, experts, gate_up, down, gate_up_bias, down_bias, clamp_limit, clamp_alpha,
                 output_mask);
}

/// Autograd again, inside of a kernel that is called below it.
class WithAutograd {
 public:
  WithAutograd() : grad_mode_(true), keys_(with_autograd(c10::impl::tls_local_dispatch_key_set())) {}

 private:
  static c10::impl::LocalDispatchKeySet with_autograd(c10::impl::LocalDispatchKeySet keys) {
    keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    return keys;
  }

  at::AutoGradMode grad_mode_;
  c10::impl::ForceDispatchKeyGuard keys_;
};

MoeGradients moe_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weights,
                          const at::Tensor& experts, const at::Tensor& gate_up, const at::Tensor& down,
                          const std::optional<at::Tensor>& gate_up_bias,
                          const std::optional<at::Tensor>& down_bias, std::optional<double> clamp_limit,
                          double clamp_alpha, std::array<bool, 6> output_mask) {
  const MoeArguments given{x,         weights,     experts,    gate_up, down, gate_up_bias,
                           down_bias, clamp_limit, clamp_alpha};
  const WithAutograd autograd;
  std::array<at::Tensor, 6> leaves = given.differentiable(), gradients;
  variable_list wanted;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].defined()) continue;
    leaves[i] = leaves[i].detach();
    if (output_mask[i]) wanted.push_back(leaves[i].requires_grad_());
  }
  if (!wanted.empty()) wanted = torch::autograd::grad({moe_of(leaves, given)}, wanted, {grad});
  for (size_t i = 0, next = 0; i < leaves.size(); ++i) {
    if (leaves[i].defined() && output_mask[i]) gradients[i] = wanted[next++].contiguous();
  }
  return std::tuple_cat(gradients);
}

class Moe : public Function<Moe> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weights,
                            const at::Tensor& experts, const at::Tensor& gate_up, const at::Tensor& down,
                            const std::optional<at::Tensor>& gate_up_bias,
                            const std::optional<at::Tensor>& down_bias, std::optional<double> clamp_limit,
                            double clamp_alpha) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor none;
    ctx->save_for_backward(
        {x, weights, experts, gate_up, down, gate_up_bias.value_or(none), down_bias.value_or(none)});
    ctx->saved_data["clamp_limit"] = clamp_limit;
    ctx->saved_data["clamp_alpha"] = clamp_alpha;
    return call_moe(x, weights, experts, gate_up, down, gate_up_bias, down_bias, clamp_limit, clamp_alpha);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    std::array<bool, 6> wanted{};
    size_t input = 0;  // numbered without those that were left out
    for (size_t i = 0, next = 0; i < saved.size(); ++i) {
      if (i == 2) {  // the experts
        ++input;
        continue;
      }
      wanted[next++] = saved[i].defined() && ctx->needs_input_grad(input++);
    }
    auto [x, weights, gate_up, down, gate_up_bias, down_bias] = call_moe_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], detail::if_defined(saved[5]),
        detail::if_defined(saved[6]), ctx->saved_data["clamp_limit"].toOptional<double>(),
        ctx->saved_data["clamp_alpha"].toDouble(), wanted);
    return {x, weights, {}, gate_up, down, gate_up_bias, down_bias, {}, {}};
  }
};

at::Tensor moe_autograd(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& experts,
                        const at::Tensor& gate_up, const at::Tensor& down,
                        const std::optional<at::Tensor>& gate_up_bias,
                        const std::optional<at::Tensor>& down_bias, std::optional<double> clamp_limit,
                        double clamp_alpha) {
  return Moe::apply(x, weights, experts, gate_up, down, gate_up_bias, down_bias, clamp_limit, clamp_alpha);
}

at::Tensor moe_meta(const at::Tensor& x, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                    const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                    std::optional<double>, double) {
  return detail::meta_like(x);
}

MoeGradients moe_backward_meta(const at::Tensor&, const at::Tensor& x, const at::Tensor& weights,
                               const at::Tensor&, const at::Tensor& gate_up, const at::Tensor& down,
                               const std::optional<at::Tensor>& gate_up_bias,
                               const std::optional<at::Tensor>& down_bias, std::optional<double>, double,
                               std::array<bool, 6> output_mask) {
  const auto if_wanted = [&](size_t i, const at::Tensor& tensor) {
    return output_mask[i] && tensor.defined() ? detail::meta_like(tensor) : at::Tensor();
  };
  const at::Tensor none;
  return {if_wanted(0, x),
          if_wanted(1, weights),
          if_wanted(2, gate_up),
          if_wanted(3, down),
          if_wanted(4, gate_up_bias.value_or(none)),
          if_wanted(5, down_bias.value_or(none))};
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("moe", &moe_autograd);
  m.impl("moe_backward", torch::autograd::autogradNotImplementedFallback());  // no double backward
}

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  m.impl("moe", &moe_forward);
  m.impl("moe_backward", &moe_backward);
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("moe", &moe_meta);
  m.impl("moe_backward", &moe_backward_meta);
}

}  // namespace espalier
