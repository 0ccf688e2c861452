// SPDX-License-Identifier: Apache-2.0
// torch.ops.espalier.moe. The number of tokens per expert depends on data, so it is one operator in traced
// graphs. Its backward pass saves only the inputs and recomputes the experts.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include "espalier/ops/moe/moe.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using torch::autograd::variable_list;

/// The arguments of the operator moe.
struct MoeArguments {
  at::Tensor x, weights, experts, gate_up, down;
  TensorOrNone gate_up_bias, down_bias;
  std::optional<double> clamp_limit = {};
  double clamp_alpha = 0;

  static auto all(auto& given) {
    return std::tie(given.x, given.weights, given.experts, given.gate_up, given.down, given.gate_up_bias,
                    given.down_bias, given.clamp_limit, given.clamp_alpha);
  }

  std::array<at::Tensor, 6> differentiable() const {
    return {x, weights, gate_up, down, gate_up_bias, down_bias};
  }
};

/// Computes the operator's result from these tensors.
at::Tensor run_moe(const std::array<at::Tensor, 6>& in, const MoeArguments& given) {
  ExpertWeights weights{in[2], in[3], in[4], in[5]};
  if (given.clamp_limit) weights.clamped = {given.clamp_alpha, *given.clamp_limit};
  return moe(in[0], {in[1], given.experts}, weights);
}

at::Tensor moe_forward(const MoeArguments& given) {
  const at::NoGradGuard no_graph;
  return run_moe(given.differentiable(), given);
}

using MoeGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Re-enables autograd inside a kernel below the autograd key.
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

MoeGradients moe_backward(const at::Tensor& grad, const MoeArguments& given,
                          std::array<bool, 6> output_mask) {
  const WithAutograd autograd;
  std::array<at::Tensor, 6> leaves = given.differentiable(), gradients;
  variable_list wanted;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].defined()) continue;
    leaves[i] = leaves[i].detach();
    if (output_mask[i]) wanted.push_back(leaves[i].requires_grad_());
  }
  if (!wanted.empty()) wanted = torch::autograd::grad({run_moe(leaves, given)}, wanted, {grad});
  for (size_t i = 0, next = 0; i < leaves.size(); ++i) {
    if (leaves[i].defined() && output_mask[i]) gradients[i] = wanted[next++].contiguous();
  }
  return std::tuple_cat(gradients);
}

struct Moe : detail::Definition<"moe", MoeArguments, at::Tensor> {
  static constexpr std::array<size_t, 6> differentiable{0, 1, 3, 4, 5, 6};

  static auto backward(const detail::Recorded<Moe>& recorded, const variable_list& grads) {
    return detail::call<"moe_backward", MoeGradients>(grads[0], recorded.given, recorded.wanted);
  }
};

at::Tensor moe_meta(const MoeArguments& given) {
  return detail::meta_like(given.x);
}

MoeGradients moe_backward_meta(const at::Tensor&, const MoeArguments& given,
                               std::array<bool, 6> output_mask) {
  std::array<at::Tensor, 6> gradients = given.differentiable();
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = detail::meta_if(output_mask[i], gradients[i]);
  return std::tuple_cat(gradients);
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  detail::Differentiated<Moe>::define(m);
}

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  detail::implement<&moe_forward, &moe_backward>(m, "moe");
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  detail::implement<&moe_meta, &moe_backward_meta>(m, "moe");
}

}  // namespace espalier
