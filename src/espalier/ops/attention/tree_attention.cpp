// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/tree_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "espalier/ops/attention/arguments.h"
#include "espalier/ops/checks.h"

namespace espalier {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using TensorPair = std::tuple<at::Tensor, at::Tensor>;
using TensorVector = std::vector<at::Tensor>;

using detail::OptionalTensor;

OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

TensorPair call_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& subtree_end, double softmax_scale, at::TensorList context_k,
                        at::TensorList context_v, const at::Tensor& context_blocks, int64_t sliding_window,
                        const OptionalTensor& position, const OptionalTensor& context_positions,
                        const OptionalTensor& sinks) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::tree_attention", "")
                             .typed<decltype(call_forward)>();
  return op.call(q, k, v, subtree_end, softmax_scale, context_k, context_v, context_blocks, sliding_window,
                 position, context_positions, sinks);
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, TensorVector, TensorVector>;

Gradients call_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const at::Tensor& subtree_end, const at::Tensor& out,
                        const at::Tensor& lse, double softmax_scale, at::TensorList context_k,
                        at::TensorList context_v, const at::Tensor& context_blocks, int64_t sliding_window,
                        const OptionalTensor& position, const OptionalTensor& context_positions) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::tree_attention_backward", "")
                             .typed<decltype(call_backward)>();
  return op.call(grad_out, q, k, v, subtree_end, out, lse, softmax_scale, context_k, context_v,
                 context_blocks, sliding_window, position, context_positions);
}

// A sink is a key without a value, so its dP is 0 and dS = -P delta, with P = exp(sink - lse) (docs/math.md).
// Summed in float64 token by token, an order that does not depend on the number of threads.
at::Tensor sink_gradient(const at::Tensor& sinks, const at::Tensor& grad_out, const at::Tensor& out,
                         const at::Tensor& lse) {
  if (lse.sym_size(1) == 0) return at::zeros_like(sinks);
  const at::ScalarType dtype = lse.scalar_type();
  const at::Tensor delta = (grad_out.to(dtype) * out.to(dtype)).sum({-1});  // [T, H]
  const at::Tensor weight = (sinks.to(dtype) - lse.t()).exp();
  return weight.mul(delta).to(at::kDouble).cumsum(0).select(0, -1).neg().to(sinks.scalar_type());
}

class TreeAttention : public torch::autograd::Function<TreeAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& subtree_end, double softmax_scale,
                               at::TensorList context_k, at::TensorList context_v,
                               const at::Tensor& context_blocks, int64_t sliding_window,
                               const OptionalTensor& position, const OptionalTensor& context_positions,
                               const OptionalTensor& sinks) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = call_forward(q, k, v, subtree_end, softmax_scale, context_k, context_v, context_blocks,
                                   sliding_window, position, context_positions, sinks);
    const at::Tensor none;
    variable_list saved{q,
                        k,
                        v,
                        subtree_end,
                        out,
                        lse,
                        context_blocks,
                        position.value_or(none),
                        context_positions.value_or(none),
                        sinks.value_or(none)};
    saved.insert(saved.end(), context_k.begin(), context_k.end());
    saved.insert(saved.end(), context_v.begin(), context_v.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->saved_data["sliding_window"] = sliding_window;
    ctx->mark_non_differentiable({lse});
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kContextBegin = 10, kNumOtherInputs = 10;
    const variable_list saved = ctx->get_saved_variables();
    const size_t segments = (saved.size() - kContextBegin) / 2;
    const at::Tensor none;
    const at::Tensor& grad_out = grads[0];
    if (!grad_out.defined()) return variable_list(kNumOtherInputs + 2 * segments);
    const at::TensorList context(saved.data() + kContextBegin, 2 * segments);
    auto [grad_q, grad_k, grad_v, grad_context_k, grad_context_v] = call_backward(
        grad_out, saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
        ctx->saved_data["softmax_scale"].toDouble(), context.slice(0, segments), context.slice(segments),
        saved[6], ctx->saved_data["sliding_window"].toInt(), optional(saved[7]), optional(saved[8]));
    variable_list result{grad_q, grad_k, grad_v, none, none};
    result.insert(result.end(), grad_context_k.begin(), grad_context_k.end());
    result.insert(result.end(), grad_context_v.begin(), grad_context_v.end());
    const at::Tensor& sinks = saved[9];
    const at::Tensor grad_sinks =
        sinks.defined() ? sink_gradient(sinks, grad_out, saved[4], saved[5]) : at::Tensor();
    result.insert(result.end(), {none, none, none, none, grad_sinks});
    return result;
  }
};

TensorPair forward_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& subtree_end, double softmax_scale, at::TensorList context_k,
                            at::TensorList context_v, const at::Tensor& context_blocks,
                            int64_t sliding_window, const OptionalTensor& position,
                            const OptionalTensor& context_positions, const OptionalTensor& sinks) {
  auto results = TreeAttention::apply(q, k, v, subtree_end, softmax_scale, context_k, context_v,
                                      context_blocks, sliding_window, position, context_positions, sinks);
  return {results[0], results[1]};
}

TensorPair forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& subtree_end, double softmax_scale, at::TensorList context_k,
                        at::TensorList context_v, const at::Tensor& context_blocks, int64_t sliding_window,
                        const OptionalTensor& position, const OptionalTensor& context_positions,
                        const OptionalTensor& sinks) {
  detail::checked_arguments(q, k, v, subtree_end, softmax_scale, context_k, context_v, context_blocks,
                            sliding_window, position, context_positions, sinks);
  const auto lse_options = q.options().dtype(detail::accumulator_dtype(q.scalar_type()));
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(1)}, lse_options).t()};
}

Gradients backward_meta(const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                        at::TensorList context_k, at::TensorList context_v, const at::Tensor&, int64_t,
                        const OptionalTensor&, const OptionalTensor&) {
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
                          const ForestTokens& tokens, const AttentionOptions& options,
                          const AttentionContext& context) {
  const at::Tensor blocks = context.blocks.defined() ? context.blocks : at::empty({0, 5}, at::kLong);
  return std::get<0>(call_forward(q, k, v, tokens.subtree_end, options.softmax_scale, context.k, context.v,
                                  blocks, options.sliding_window, optional(tokens.position),
                                  optional(context.positions), optional(options.sinks)));
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
