// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/edge_logprobs/edge_distribution.h"

#include <cmath>

#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/arguments.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::DistributionArguments;
using detail::DistributionBackward;
using detail::DistributionGradients;
using detail::DistributionResults;
using detail::meta_if;

struct Distribution : detail::Definition<"edge_distribution", DistributionArguments, DistributionResults> {
  static constexpr std::array<size_t, 3> differentiable{0, 1, 4};
  static constexpr size_t first_statistic = 2, first_kept = 2;

  static auto backward(const detail::Recorded<Distribution>& recorded, const detail::TensorVector& grads) {
    return detail::call<"edge_distribution_backward", DistributionGradients>(DistributionBackward{
        grads[0], grads[1], recorded.kept[0], recorded.kept[1], recorded.given, recorded.wanted});
  }
};

DistributionResults distribution_autograd(const DistributionArguments& given) {
  const at::Tensor& edge_temperature = given.transform.edge_temperature;
  TORCH_CHECK(!edge_temperature.defined() || !edge_temperature.requires_grad(),
              "edge_distribution: expected an edge_temperature that needs no gradient (there is none): "
              "detach it");
  return detail::Differentiated<Distribution>::run(given);
}

DistributionResults distribution_meta(const DistributionArguments& given) {
  detail::check_edge_distribution(given);
  const at::Tensor& hidden = given.edges.hidden;
  const auto options = hidden.options().dtype(detail::accumulator_dtype(hidden.scalar_type()));
  const c10::SymInt edges = given.edges.edge_row.sym_size(0);
  return {at::empty_symint({edges}, options), at::empty_symint({edges}, options),
          at::empty_symint({edges}, options.dtype(at::kDouble)),
          at::empty_symint({edges}, options.dtype(at::kDouble))};
}

DistributionGradients distribution_backward_meta(const DistributionBackward& backward) {
  const auto& [edges, transform] = backward.given;
  return {meta_if(backward.wanted[0], edges.hidden), meta_if(backward.wanted[1], edges.weight),
          meta_if(backward.wanted[2], transform.bias)};
}

}  // namespace

void detail::check_edge_distribution(const DistributionArguments& given) {
  const char* op = "edge_distribution";
  const auto& [edges, transform] = given;
  check_edge_logprobs(edges);
  const at::TensorOptions options = edges.hidden.options();
  const at::ScalarType sums = accumulator_dtype(edges.hidden.scalar_type());
  check_if_defined(op, "bias", transform.bias, {"[V]", {edges.weight.sym_size(0)}, options});
  check_if_defined(op, "edge_temperature", transform.edge_temperature,
                   {"[E]", {edges.edge_row.sym_size(0)}, options.dtype(sums)});
  TORCH_CHECK(std::isfinite(transform.temperature) && transform.temperature > 0, op,
              ": temperature must be above 0, received ", transform.temperature);
  TORCH_CHECK(std::isfinite(transform.logit_scale), op, ": logit_scale must be finite, received ",
              transform.logit_scale);
  TORCH_CHECK(std::isfinite(transform.softcap) && transform.softcap >= 0, op,
              ": softcap must be above 0, or 0 for none, received ", transform.softcap);
}

EdgeDistribution edge_distribution(const at::Tensor& hidden, const at::Tensor& weight,
                                   const at::Tensor& edge_row, const at::Tensor& edge_target,
                                   const LogitTransform& transform) {
  auto [logprobs, entropy, lse, mean] =
      Distribution::forward({{hidden, weight, edge_row, edge_target}, transform});
  return {logprobs, entropy};
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("edge_distribution", detail::kKernel<&distribution_autograd>);
  m.impl("edge_distribution_backward",
         torch::autograd::autogradNotImplementedFallback());  // no double backward
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  detail::implement<&distribution_meta, &distribution_backward_meta>(m, "edge_distribution");
}

}  // namespace espalier
