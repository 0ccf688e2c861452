#include "espalier/ops/tree_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "espalier/ops/checks.h"

namespace espalier {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::tuple<at::Tensor, at::Tensor> call_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                const at::Tensor& subtree_end, double softmax_scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::tree_attention", "")
                             .typed<decltype(call_forward)>();
  return op.call(q, k, v, subtree_end, softmax_scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                                             const at::Tensor& k, const at::Tensor& v,
                                                             const at::Tensor& subtree_end,
                                                             const at::Tensor& out, const at::Tensor& lse,
                                                             double softmax_scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::tree_attention_backward", "")
                             .typed<decltype(call_backward)>();
  return op.call(grad_out, q, k, v, subtree_end, out, lse, softmax_scale);
}

class TreeAttention : public torch::autograd::Function<TreeAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& subtree_end, double softmax_scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = call_forward(q, k, v, subtree_end, softmax_scale);
    ctx->save_for_backward({q, k, v, subtree_end, out, lse});
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->mark_non_differentiable({lse});
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor& grad_out = grads[0];
    if (!grad_out.defined()) return {{}, {}, {}, {}, {}};
    const variable_list saved = ctx->get_saved_variables();
    auto [grad_q, grad_k, grad_v] = call_backward(grad_out, saved[0], saved[1], saved[2], saved[3], saved[4],
                                                  saved[5], ctx->saved_data["softmax_scale"].toDouble());
    return {grad_q, grad_k, grad_v, {}, {}};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, const at::Tensor& subtree_end,
                                                    double softmax_scale) {
  auto results = TreeAttention::apply(q, k, v, subtree_end, softmax_scale);
  return {results[0], results[1]};
}

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                const at::Tensor& subtree_end, double) {
  detail::check_tree_attention(q, k, v, subtree_end);
  const auto lse_options = q.options().dtype(detail::accumulator_dtype(q.scalar_type()));
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(1)}, lse_options).t()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_meta(const at::Tensor&, const at::Tensor& q,
                                                             const at::Tensor& k, const at::Tensor& v,
                                                             const at::Tensor&, const at::Tensor&,
                                                             const at::Tensor&, double) {
  return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(k.sym_sizes(), k.options()),
          at::empty_symint(v.sym_sizes(), v.options())};
}

}  // namespace

at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& subtree_end, double softmax_scale) {
  return std::get<0>(call_forward(q, k, v, subtree_end, softmax_scale));
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("tree_attention", &forward_autograd);
  m.impl("tree_attention_backward", torch::autograd::autogradNotImplementedFallback());  // no double backward
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("tree_attention", &forward_meta);
  m.impl("tree_attention_backward", &backward_meta);
}

}  // namespace espalier
