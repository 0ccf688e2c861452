// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/tree_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "espalier/ops/checks.h"

namespace espalier {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using TensorPair = std::tuple<at::Tensor, at::Tensor>;
using TensorVector = std::vector<at::Tensor>;

TensorPair call_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& subtree_end, double softmax_scale, at::TensorList context_k,
                        at::TensorList context_v, const at::Tensor& context_blocks) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::tree_attention", "")
                             .typed<decltype(call_forward)>();
  return op.call(q, k, v, subtree_end, softmax_scale, context_k, context_v, context_blocks);
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, TensorVector, TensorVector>;

Gradients call_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const at::Tensor& subtree_end, const at::Tensor& out,
                        const at::Tensor& lse, double softmax_scale, at::TensorList context_k,
                        at::TensorList context_v, const at::Tensor& context_blocks) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::tree_attention_backward", "")
                             .typed<decltype(call_backward)>();
  return op.call(grad_out, q, k, v, subtree_end, out, lse, softmax_scale, context_k, context_v,
                 context_blocks);
}

class TreeAttention : public torch::autograd::Function<TreeAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& subtree_end, double softmax_scale,
                               at::TensorList context_k, at::TensorList context_v,
                               const at::Tensor& context_blocks) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = call_forward(q, k, v, subtree_end, softmax_scale, context_k, context_v, context_blocks);
    variable_list saved{q, k, v, subtree_end, out, lse, context_blocks};
    saved.insert(saved.end(), context_k.begin(), context_k.end());
    saved.insert(saved.end(), context_v.begin(), context_v.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->mark_non_differentiable({lse});
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kContextBegin = 7;
    const variable_list saved = ctx->get_saved_variables();
    const size_t segments = (saved.size() - kContextBegin) / 2;
    const at::Tensor none;
    const at::Tensor& grad_out = grads[0];
    if (!grad_out.defined()) return variable_list(6 + 2 * segments);
    const at::TensorList context(saved.data() + kContextBegin, 2 * segments);
    auto [grad_q, grad_k, grad_v, grad_context_k, grad_context_v] =
        call_backward(grad_out, saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
                      ctx->saved_data["softmax_scale"].toDouble(), context.slice(0, segments),
                      context.slice(segments), saved[6]);
    variable_list result{grad_q, grad_k, grad_v, none, none};
    result.insert(result.end(), grad_context_k.begin(), grad_context_k.end());
    result.insert(result.end(), grad_context_v.begin(), grad_context_v.end());
    result.push_back(none);
    return result;
  }
};

TensorPair forward_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& subtree_end, double softmax_scale, at::TensorList context_k,
                            at::TensorList context_v, const at::Tensor& context_blocks) {
  auto results =
      TreeAttention::apply(q, k, v, subtree_end, softmax_scale, context_k, context_v, context_blocks);
  return {results[0], results[1]};
}

TensorPair forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& subtree_end, double, at::TensorList context_k,
                        at::TensorList context_v, const at::Tensor& context_blocks) {
  detail::check_tree_attention(q, k, v, subtree_end);
  detail::check_attention_context(k, context_k, context_v, context_blocks);
  const auto lse_options = q.options().dtype(detail::accumulator_dtype(q.scalar_type()));
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(1)}, lse_options).t()};
}

Gradients backward_meta(const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                        at::TensorList context_k, at::TensorList context_v, const at::Tensor&) {
  const auto like = [](const at::Tensor& tensor) {
    return at::empty_symint(tensor.sym_sizes(), tensor.options());
  };
  TensorVector grad_context_k, grad_context_v;
  for (const at::Tensor& segment : context_k) grad_context_k.push_back(like(segment));
  for (const at::Tensor& segment : context_v) grad_context_v.push_back(like(segment));
  return {like(q), like(k), like(v), grad_context_k, grad_context_v};
}

}  // namespace

at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& subtree_end, double softmax_scale,
                          const AttentionContext& context) {
  const at::Tensor blocks = context.blocks.defined() ? context.blocks : at::empty({0, 5}, at::kLong);
  return std::get<0>(call_forward(q, k, v, subtree_end, softmax_scale, context.k, context.v, blocks));
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
