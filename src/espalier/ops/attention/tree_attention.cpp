// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/tree_attention.h"

#include "espalier/ops/attention/arguments.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::meta_like;
using detail::TensorVector;
using detail::TreeAttentionArguments;
using detail::TreeAttentionBackward;
using detail::TreeAttentionGradients;
using detail::TreeAttentionResults;

// A sink is a key with value 0, so its dP is 0 and dS = -P delta, with P = exp(sink - lse) (docs/math.md).
// Summed in float64 in token order, independent of the number of threads.
at::Tensor sink_gradient(const at::Tensor& sinks, const at::Tensor& grad_out, const at::Tensor& out,
                         const at::Tensor& lse) {
  if (lse.sym_size(1) == 0) return at::zeros_like(sinks);
  const at::ScalarType dtype = lse.scalar_type();
  const at::Tensor delta = (grad_out.to(dtype) * out.to(dtype)).sum({-1});  // [T, H]
  const at::Tensor weight = (sinks.to(dtype) - lse.t()).exp();
  return weight.mul(delta).to(at::kDouble).cumsum(0).select(0, -1).neg().to(sinks.scalar_type());
}

struct TreeAttention : detail::Definition<"tree_attention", TreeAttentionArguments, TreeAttentionResults> {
  static constexpr std::array<size_t, 6> differentiable{0, 1, 2, 5, 6, 11};
  static constexpr size_t first_statistic = 1, first_kept = 0;

  static auto backward(const detail::Recorded<TreeAttention>& recorded, const TensorVector& grads) {
    const at::Tensor &sinks = recorded.given.options.sinks, &out = recorded.kept[0], &lse = recorded.kept[1];
    const TreeAttentionBackward given{grads[0], out, lse, recorded.given};
    return std::tuple_cat(
        detail::call<"tree_attention_backward", TreeAttentionGradients>(given),
        std::tuple(sinks.defined() ? sink_gradient(sinks, grads[0], out, lse) : at::Tensor()));
  }
};

TreeAttentionResults forward_meta(const TreeAttentionArguments& given) {
  detail::check_tree_attention(given);
  const at::Tensor& q = given.q;
  const auto lse_options = q.options().dtype(detail::accumulator_dtype(q.scalar_type()));
  return {at::empty_symint({q.sym_size(0), q.sym_size(1), given.v.sym_size(2)}, q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(1)}, lse_options).t()};
}

TreeAttentionGradients backward_meta(const TreeAttentionBackward& backward) {
  const auto& [q, k, v, tokens, options, context] = backward.given;
  TensorVector context_k, context_v;
  for (const at::Tensor& segment : context.k) context_k.push_back(meta_like(segment));
  for (const at::Tensor& segment : context.v) context_v.push_back(meta_like(segment));
  return {meta_like(q), meta_like(k), meta_like(v), context_k, context_v};
}

}  // namespace

at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const ForestTokens& tokens, const AttentionOptions& options,
                          const AttentionContext& context) {
  TreeAttentionArguments given{q, k, v, tokens, options, context};
  if (!context.blocks.defined()) given.context.blocks = at::empty({0, 5}, at::kLong);
  return std::get<0>(TreeAttention::forward(given));
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  detail::Differentiated<TreeAttention>::define(m);
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  detail::implement<&forward_meta, &backward_meta>(m, "tree_attention");
}

}  // namespace espalier
