// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/edge_logprobs/edge_logprobs.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "espalier/ops/checks.h"

namespace espalier {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::tuple<at::Tensor, at::Tensor> call_forward(const at::Tensor& hidden, const at::Tensor& weight,
                                                const at::Tensor& edge_row, const at::Tensor& edge_target) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::edge_logprobs", "")
                             .typed<decltype(call_forward)>();
  return op.call(hidden, weight, edge_row, edge_target);
}

std::tuple<at::Tensor, at::Tensor> call_backward(const at::Tensor& grad_logprobs, const at::Tensor& hidden,
                                                 const at::Tensor& weight, const at::Tensor& edge_row,
                                                 const at::Tensor& edge_target, const at::Tensor& lse,
                                                 std::array<bool, 2> output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::edge_logprobs_backward", "")
                             .typed<decltype(call_backward)>();
  return op.call(grad_logprobs, hidden, weight, edge_row, edge_target, lse, output_mask);
}

at::Tensor call_backward_in_place(const at::Tensor& grad_logprobs, const at::Tensor& hidden,
                                  const at::Tensor& weight, const at::Tensor& edge_row,
                                  const at::Tensor& edge_target, const at::Tensor& lse,
                                  const std::optional<at::Tensor>& grad_weight) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::edge_logprobs_backward_", "")
                             .typed<decltype(call_backward_in_place)>();
  return op.call(grad_logprobs, hidden, weight, edge_row, edge_target, lse, grad_weight);
}

class EdgeLogprobs : public torch::autograd::Function<EdgeLogprobs> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                               const at::Tensor& edge_row, const at::Tensor& edge_target) {
    auto [logprobs, lse] = edge_logprobs_forward(hidden, weight, edge_row, edge_target);
    ctx->save_for_backward({hidden, weight, edge_row, edge_target, lse});
    ctx->mark_non_differentiable({lse});
    ctx->set_materialize_grads(false);
    return {logprobs, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor& grad_logprobs = grads[0];
    if (!grad_logprobs.defined()) return {{}, {}, {}, {}};
    const variable_list saved = ctx->get_saved_variables();
    auto [grad_hidden, grad_weight] =
        call_backward(grad_logprobs, saved[0], saved[1], saved[2], saved[3], saved[4],
                      {ctx->needs_input_grad(0), ctx->needs_input_grad(1)});
    return {grad_hidden, grad_weight, {}, {}};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(const at::Tensor& hidden, const at::Tensor& weight,
                                                    const at::Tensor& edge_row,
                                                    const at::Tensor& edge_target) {
  auto results = EdgeLogprobs::apply(hidden, weight, edge_row, edge_target);
  return {results[0], results[1]};
}

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& hidden, const at::Tensor& weight,
                                                const at::Tensor& edge_row, const at::Tensor& edge_target) {
  detail::check_edge_logprobs(hidden, weight, edge_row, edge_target);
  const auto options = hidden.options().dtype(detail::accumulator_dtype(hidden.scalar_type()));
  return {at::empty_symint({edge_row.sym_size(0)}, options),
          at::empty_symint({hidden.sym_size(0)}, options.dtype(at::kDouble))};
}

std::tuple<at::Tensor, at::Tensor> backward_meta(const at::Tensor&, const at::Tensor& hidden,
                                                 const at::Tensor& weight, const at::Tensor&,
                                                 const at::Tensor&, const at::Tensor&,
                                                 std::array<bool, 2> output_mask) {
  return {output_mask[0] ? at::empty_symint(hidden.sym_sizes(), hidden.options()) : at::Tensor(),
          output_mask[1] ? at::empty_symint(weight.sym_sizes(), weight.options()) : at::Tensor()};
}

at::Tensor backward_in_place_meta(const at::Tensor&, const at::Tensor& hidden, const at::Tensor&,
                                  const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                  const std::optional<at::Tensor>&) {
  return at::empty_symint(hidden.sym_sizes(), hidden.options());
}

}  // namespace

at::Tensor edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target) {
  return std::get<0>(call_forward(hidden, weight, edge_row, edge_target));
}

std::tuple<at::Tensor, at::Tensor> edge_logprobs_forward(const at::Tensor& hidden, const at::Tensor& weight,
                                                         const at::Tensor& edge_row,
                                                         const at::Tensor& edge_target) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_forward(hidden, weight, edge_row, edge_target);
}

at::Tensor edge_logprobs_backward(const at::Tensor& grad_logprobs, const at::Tensor& hidden,
                                  const at::Tensor& weight, const at::Tensor& edge_row,
                                  const at::Tensor& edge_target, const at::Tensor& lse,
                                  const at::Tensor& grad_weight) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_backward_in_place(
      grad_logprobs, hidden, weight, edge_row, edge_target, lse,
      grad_weight.defined() ? std::optional<at::Tensor>(grad_weight) : std::nullopt);
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("edge_logprobs", &forward_autograd);
  // No double backward.
  m.impl("edge_logprobs_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("edge_logprobs_backward_", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("edge_logprobs", &forward_meta);
  m.impl("edge_logprobs_backward", &backward_meta);
  m.impl("edge_logprobs_backward_", &backward_in_place_meta);
}

}  // namespace espalier
