// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/recompute.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <utility>

namespace espalier {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Wraps a function so that autograd can save it as an IValue.
struct Held : torch::CustomClassHolder {
  explicit Held(Recomputed given) : function(std::move(given)) {}
  Recomputed function;
};

class Recompute : public torch::autograd::Function<Recompute> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const c10::intrusive_ptr<Held>& held) {
    ctx->save_for_backward({input});
    ctx->saved_data["function"] = c10::IValue::make_capsule(held);
    ctx->set_materialize_grads(false);
    return held->function(input);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto held = c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["function"].toCapsule());
    const at::Tensor input = ctx->get_saved_variables()[0].detach().requires_grad_();
    variable_list results, result_grads;
    {
      const at::AutoGradMode with_grad(true);
      const variable_list all = held->function(input);
      for (size_t i = 0; i < grads.size(); ++i) {
        if (!grads[i].defined()) continue;
        results.push_back(all[i]);
        result_grads.push_back(grads[i]);
      }
    }
    if (!results.empty()) torch::autograd::backward(results, result_grads);
    return {input.grad(), at::Tensor()};
  }
};

}  // namespace

std::vector<at::Tensor> recompute(const at::Tensor& input, Recomputed function) {
  // Autograd runs backward only if an input requires grad. The input of the first layer of a frozen model
  // does not, although the layer's adapters do.
  const bool frozen = at::GradMode::is_enabled() && !input.requires_grad();
  return Recompute::apply(frozen ? input.detach().requires_grad_() : input,
                          c10::make_intrusive<Held>(std::move(function)));
}

}  // namespace espalier
