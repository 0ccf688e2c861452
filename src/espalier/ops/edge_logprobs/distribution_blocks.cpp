// SPDX-License-Identifier: Apache-2.0
// edge_distribution by blocks of logits (edges x vocabulary entries), with ATen operators, for any device.
//
// Forward: with the maximum m of an edge's logits so far and u = z - m <= 0, s = sum exp(u) and t = sum
// exp(u) u are carried from block to block in float64. Finally lse = m + log(s), the mean logit is m + t / s,
// and the entropy log(s) - t / s; both terms are non-negative, so there is no cancellation.
// Backward: docs/math.md.
//
// Blocks depend only on sizes. Each edge has its own row, so no two edges add to the same logit.
#include <ATen/ATen.h>

#include <limits>

#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/arguments.h"
#include "espalier/ops/edge_logprobs/blocks.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::accumulator_dtype;
using detail::columns_of;
using detail::rows_of;

// exp of it is 0 in every dtype, and unlike -infinity its product with 0 is 0.
constexpr double kNoLogProb = -1e4;

/// Computes transformed logits of blocks.
class Logits {
 public:
  explicit Logits(const detail::DistributionArguments& given)
      : given_(given.transform), dtype_(accumulator_dtype(given.edges.hidden.scalar_type())) {}

  struct Block {
    at::Tensor z;         // [n, m]
    at::Tensor squashed;  // tanh(z / softcap) before the temperature; undefined without softcap
  };

  Block of(const LogitRange& block, const at::Tensor& hidden, const at::Tensor& weight) const {
    at::Tensor z = detail::unrounded_product(hidden, weight.t());
    if (given_.bias.defined()) z.add_(columns_of(given_.bias, block).to(dtype_));
    if (given_.logit_scale != 1) z.mul_(given_.logit_scale);
    at::Tensor squashed;
    if (given_.softcap > 0) {
      squashed = z.div_(given_.softcap).tanh_();
      z = squashed * given_.softcap;
    }
    return {divide_by_temperature(z, block), squashed};
  }

  /// Gradients of hidden weight^T + bias from those of z, in place of these and of `squashed`.
  at::Tensor to_product(at::Tensor grad, const Block& logits, const LogitRange& block) const {
    divide_by_temperature(grad, block);
    if (logits.squashed.defined()) grad.mul_(logits.squashed.square_().neg_().add_(1));
    return given_.logit_scale == 1 ? grad : grad.mul_(given_.logit_scale);
  }

  at::ScalarType dtype() const { return dtype_; }

 private:
  at::Tensor divide_by_temperature(at::Tensor values, const LogitRange& block) const {
    if (given_.temperature != 1) values.div_(given_.temperature);
    if (given_.edge_temperature.defined()) values.div_(rows_of(given_.edge_temperature, block).unsqueeze(1));
    return values;
  }

  const LogitTransform& given_;
  at::ScalarType dtype_;
};

/// The columns of targets in the block; arbitrary but valid, and not inside, for targets of other blocks.
struct Targets {
  at::Tensor inside;  // [n] bool
  at::Tensor column;  // [n, 1]

  Targets(const at::Tensor& edge_target, const LogitRange& block) {
    const int64_t columns = block.column_end - block.column_begin;
    const at::Tensor place = rows_of(edge_target, block).sub(block.column_begin);
    inside = place.ge(0).logical_and(place.lt(columns));
    column = place.clamp(0, columns - 1).unsqueeze(1);
  }
};

std::span<const int64_t> to_span(const at::Tensor& contiguous) {
  return {contiguous.const_data_ptr<int64_t>(), static_cast<size_t>(contiguous.numel())};
}

/// As in edge_logprobs, values of edges are checked only on the CPU, where that needs no synchronisation.
void check(const detail::DistributionArguments& given) {
  detail::check_edge_distribution(given);
  const auto& [hidden, weight, edge_row, edge_target] = given.edges;
  if (!hidden.is_cpu()) return;
  const at::Tensor row = edge_row.contiguous(), target = edge_target.contiguous();
  detail::check_edge_values(to_span(row), to_span(target), hidden.size(0), weight.size(0));
  const at::Tensor& temperature = given.transform.edge_temperature;
  TORCH_CHECK(
      !temperature.defined() || temperature.gt(0).logical_and(temperature.isfinite()).all().item<bool>(),
      "edge_distribution: every edge_temperature must be above 0, received one that is not");
}

detail::DistributionResults forward(const detail::DistributionArguments& given) {
  check(given);
  const at::Tensor &hidden = given.edges.hidden, &weight = given.edges.weight;
  const at::Tensor &edge_row = given.edges.edge_row, &edge_target = given.edges.edge_target;
  const Logits logits(given);
  const at::Tensor hidden_of_edges = hidden.index_select(0, edge_row);
  // The lowest float32 is exact in every block dtype.
  const at::Tensor maximum =
      at::full({edge_row.size(0)}, std::numeric_limits<float>::lowest(), hidden.options().dtype(at::kDouble));
  const at::Tensor sum = at::zeros_like(maximum), moment = at::zeros_like(maximum);
  const at::Tensor logit = at::full_like(maximum, std::numeric_limits<double>::quiet_NaN());
  const LogitRange all{0, edge_row.size(0), 0, weight.size(0)};
  for_each_part(all, detail::block_of(edge_row.size(0), given.edges), [&](const LogitRange& block) {
    const at::Tensor z = logits.of(block, rows_of(hidden_of_edges, block), columns_of(weight, block)).z;
    const Targets targets(edge_target, block);
    const at::Tensor logit_here = rows_of(logit, block), m = rows_of(maximum, block);
    const at::Tensor s = rows_of(sum, block), t = rows_of(moment, block);
    logit_here.copy_(
        at::where(targets.inside, z.gather(1, targets.column).squeeze(1).to(at::kDouble), logit_here));
    const at::Tensor larger = m.maximum(z.amax(1).to(at::kDouble)), change = m.sub(larger);
    t.add_(change.mul(s)).mul_(change.exp());
    s.mul_(change.exp());
    const at::Tensor u = z.sub_(larger.to(logits.dtype()).unsqueeze(1)), exps = u.exp();
    s.add_(exps.sum({1}, false, at::kDouble));
    t.add_(exps.mul_(u.clamp_min_(kNoLogProb)).sum({1}, false, at::kDouble));
    m.copy_(larger);
  });
  const at::Tensor log_sum = sum.log(), mean = moment.div_(sum);
  return {logit.sub_(maximum).sub_(log_sum).to(logits.dtype()), log_sum.sub(mean).to(logits.dtype()),
          maximum.add(log_sum), maximum.add(mean)};
}

/// float64 values per edge, split into two parts in the accumulator dtype [E, 1]. A rounding error would
/// scale all gradients of an edge.
class InTwoParts {
 public:
  InTwoParts(const at::Tensor& values, at::ScalarType dtype)
      : part_(values.to(dtype).unsqueeze(1)), rest_(values.unsqueeze(1).sub(part_).to(dtype)) {}

  at::Tensor from(const at::Tensor& z, const LogitRange& block) const {
    return z.sub(rows_of(part_, block)).sub_(rows_of(rest_, block)).clamp_min_(kNoLogProb);
  }

 private:
  at::Tensor part_, rest_;
};

/// The upstream gradients of edges, [E, 1] in the accumulator dtype.
class EdgeGradients {
 public:
  EdgeGradients(const detail::DistributionBackward& given, at::ScalarType dtype)
      : lse_(given.lse, dtype), mean_(given.mean, dtype) {
    if (given.grad_logprobs.defined()) grad_logprobs_ = given.grad_logprobs.to(dtype).unsqueeze(1);
    if (given.grad_entropy.defined()) grad_entropy_ = given.grad_entropy.to(dtype).unsqueeze(1);
  }

  /// Gradients of transformed logits.
  at::Tensor logit_gradients(const at::Tensor& z, const Targets& targets, const LogitRange& block) const {
    const at::Tensor prob = lse_.from(z, block).exp_();
    at::Tensor grad;
    if (grad_entropy_.defined()) {
      grad = mean_.from(z, block).mul_(rows_of(grad_entropy_, block));
      if (grad_logprobs_.defined()) grad.add_(rows_of(grad_logprobs_, block));
      grad.mul_(prob).neg_();
    } else {
      grad = prob.mul_(rows_of(grad_logprobs_, block).neg());
    }
    if (grad_logprobs_.defined())
      grad.scatter_add_(1, targets.column, rows_of(grad_logprobs_, block) * targets.inside.unsqueeze(1));
    return grad;
  }

 private:
  InTwoParts lse_, mean_;
  at::Tensor grad_logprobs_, grad_entropy_;
};

at::Tensor sum_by_row(const at::Tensor& grad_of_edges, const at::Tensor& edge_row, int64_t num_rows) {
  at::Tensor sum = at::zeros({num_rows, grad_of_edges.size(1)}, grad_of_edges.options());
  // In edge order: index_put_ on GPUs, index_add_ on the CPU; the respective other one uses atomics.
  if (sum.is_cpu()) return sum.index_add_(0, edge_row, grad_of_edges);
  return sum.index_put_({edge_row}, grad_of_edges, /*accumulate=*/true);
}

detail::DistributionGradients backward(const detail::DistributionBackward& backward) {
  const detail::DistributionArguments& given = backward.given;
  check(given);
  const at::Tensor &hidden = given.edges.hidden, &weight = given.edges.weight;
  const at::Tensor &edge_row = given.edges.edge_row, &edge_target = given.edges.edge_target;
  const at::Tensor& bias = given.transform.bias;
  TORCH_CHECK(backward.grad_logprobs.defined() || backward.grad_entropy.defined(),
              "edge_distribution_backward: expected a gradient of the log-probabilities or the entropies, "
              "received neither");
  const Logits logits(given);
  const EdgeGradients edges(backward, logits.dtype());
  const at::Tensor hidden_of_edges = hidden.index_select(0, edge_row);
  at::Tensor grad_hidden, grad_weight, grad_bias;
  if (backward.wanted[0])
    grad_hidden = at::zeros(hidden_of_edges.sizes(), hidden.options().dtype(logits.dtype()));
  if (backward.wanted[1]) grad_weight = at::zeros(weight.sizes(), weight.options());
  if (backward.wanted[2] && bias.defined())
    grad_bias = at::zeros(bias.sizes(), bias.options().dtype(at::kDouble));
  detail::add_gradients_of_products(
      {hidden_of_edges, weight},
      [&](const LogitRange& block, const at::Tensor& rows, const at::Tensor& columns) {
        const Logits::Block here = logits.of(block, rows, columns);
        const at::Tensor grad =
            logits.to_product(edges.logit_gradients(here.z, Targets(edge_target, block), block), here, block);
        if (grad_bias.defined()) columns_of(grad_bias, block).add_(grad.sum({0}, false, at::kDouble));
        return grad.to(detail::product_dtype(hidden));
      },
      grad_hidden, grad_weight, detail::block_of(edge_row.size(0), given.edges));
  if (grad_hidden.defined())
    grad_hidden = sum_by_row(grad_hidden, edge_row, hidden.size(0)).to(hidden.scalar_type());
  if (grad_bias.defined()) grad_bias = grad_bias.to(bias.scalar_type());
  return {grad_hidden, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  detail::implement<&forward, &backward>(m, "edge_distribution");
}

}  // namespace espalier
