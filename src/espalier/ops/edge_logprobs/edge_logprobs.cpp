// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/edge_logprobs/edge_logprobs.h"

#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/arguments.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::EdgeLogprobsArguments;
using detail::EdgeLogprobsResults;
using detail::EdgeLogprobsSaved;
using detail::HeadGradients;
using detail::meta_if;
using detail::meta_like;

struct EdgeLogprobs : detail::Definition<"edge_logprobs", EdgeLogprobsArguments, EdgeLogprobsResults> {
  static constexpr std::array<size_t, 2> differentiable{0, 1};
  static constexpr size_t first_statistic = 1, first_kept = 1;

  static auto backward(const detail::Recorded<EdgeLogprobs>& recorded, const detail::TensorVector& grads) {
    const EdgeLogprobsSaved saved{grads[0], recorded.given, recorded.kept[0]};
    return detail::call<"edge_logprobs_backward", HeadGradients>(saved, recorded.wanted);
  }
};

EdgeLogprobsResults forward_meta(const EdgeLogprobsArguments& given) {
  detail::check_edge_logprobs(given);
  const at::Tensor& hidden = given.hidden;
  const auto options = hidden.options().dtype(detail::accumulator_dtype(hidden.scalar_type()));
  return {at::empty_symint({given.edge_row.sym_size(0)}, options),
          at::empty_symint({hidden.sym_size(0)}, options.dtype(at::kDouble))};
}

HeadGradients backward_meta(const EdgeLogprobsSaved& saved, std::array<bool, 2> wanted) {
  return {meta_if(wanted[0], saved.given.hidden), meta_if(wanted[1], saved.given.weight)};
}

at::Tensor backward_in_place_meta(const EdgeLogprobsSaved& saved, const TensorOrNone&) {
  return meta_like(saved.given.hidden);
}

at::Tensor zero_sums(const at::Tensor& like) {
  return at::zeros(like.sizes(), like.options().dtype(detail::accumulator_dtype(like.scalar_type())));
}

}  // namespace

void detail::check_edge_logprobs(const EdgeLogprobsArguments& given) {
  const char* op = "edge_logprobs";
  const auto& [hidden, weight, edge_row, edge_target] = given;
  check_float(op, "hidden", hidden);
  check_rank(op, "hidden", hidden, 2);
  check_rank(op, "weight", weight, 2);
  TORCH_CHECK(weight.sym_size(0) > 0, op, ": weight must be [V, C], V > 0, received ", weight.sym_sizes());
  check_tensor(op, "weight", weight, {"[V, C]", {weight.sym_size(0), hidden.sym_size(1)}, hidden.options()});
  const at::TensorOptions index = hidden.options().dtype(at::kLong);
  check_rank(op, "edge_row", edge_row, 1);
  check_tensor(op, "edge_row", edge_row, {"[E]", edge_row.sym_sizes(), index});
  check_tensor(op, "edge_target", edge_target, {"[E]", edge_row.sym_sizes(), index});
}

detail::HeadGradients detail::head_gradients(const EdgeLogprobsSaved& saved, std::array<bool, 2> wanted,
                                             AddHeadGradients add) {
  const at::Tensor &hidden = saved.given.hidden, &weight = saved.given.weight;
  check_edge_logprobs(saved.given);
  at::Tensor grad_hidden, grad_weight;
  if (wanted[0]) grad_hidden = zero_sums(hidden);
  if (wanted[1]) grad_weight = at::zeros(weight.sizes(), weight.options());
  add(saved, grad_hidden, grad_weight);
  return {wanted[0] ? grad_hidden.to(hidden.scalar_type()) : grad_hidden, grad_weight};
}

at::Tensor detail::add_head_gradients(const EdgeLogprobsSaved& saved, const TensorOrNone& grad_weight,
                                      AddHeadGradients add) {
  const at::Tensor &hidden = saved.given.hidden, &weight = saved.given.weight;
  check_edge_logprobs(saved.given);
  const bool is_part =
      grad_weight.defined() && grad_weight.dim() == 2 && grad_weight.sym_size(1) < weight.sym_size(1);
  check_if_defined(
      "edge_logprobs_backward_", "grad_weight", grad_weight,
      {"[V, C] or its last columns",
       is_part ? c10::SymDimVector{weight.sym_size(0), grad_weight.sym_size(1)} : weight.sym_sizes(),
       weight.options().dtype(accumulator_dtype(weight.scalar_type()))});
  const at::Tensor grad_hidden = zero_sums(hidden);
  add(saved, grad_hidden, grad_weight);
  return grad_hidden.to(hidden.scalar_type());
}

at::Tensor edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target) {
  return std::get<0>(EdgeLogprobs::forward({hidden, weight, edge_row, edge_target}));
}

std::tuple<at::Tensor, at::Tensor> edge_logprobs_forward(const at::Tensor& hidden, const at::Tensor& weight,
                                                         const at::Tensor& edge_row,
                                                         const at::Tensor& edge_target) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return EdgeLogprobs::forward({hidden, weight, edge_row, edge_target});
}

at::Tensor edge_logprobs_backward(const at::Tensor& grad_logprobs, const at::Tensor& hidden,
                                  const at::Tensor& weight, const at::Tensor& edge_row,
                                  const at::Tensor& edge_target, const at::Tensor& lse,
                                  const at::Tensor& grad_weight) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const EdgeLogprobsSaved saved{grad_logprobs, {hidden, weight, edge_row, edge_target}, lse};
  return detail::call<"edge_logprobs_backward_", at::Tensor>(saved, TensorOrNone(grad_weight));
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  detail::Differentiated<EdgeLogprobs>::define(m);
  m.impl("edge_logprobs_backward_", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  detail::implement<&forward_meta, &backward_meta>(m, "edge_logprobs");
  m.impl("edge_logprobs_backward_", detail::kKernel<&backward_in_place_meta>);
}

}  // namespace espalier
