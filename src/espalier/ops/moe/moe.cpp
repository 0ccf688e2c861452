// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/moe/moe.h"

#include <limits>
#include <tuple>
#include <vector>

#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise/activations.h"
#include "espalier/ops/elementwise/elementwise.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

void check_route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
                 const RouterOptions& options) {
  const char* op = "moe_route";
  detail::check_rank(op, "logits", logits, 2);
  TORCH_CHECK(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble, op,
              ": logits must be float32 or float64, received ", logits.scalar_type());
  TORCH_CHECK(!(options.sigmoid && options.softmax_over_chosen), op,
              ": expected sigmoid or softmax_over_chosen, received both");
  const int64_t num_experts = logits.sym_size(1).guard_int(__FILE__, __LINE__), groups = options.num_groups;
  detail::check_if_defined(op, "correction_bias", correction_bias.value_or(at::Tensor()),
                           {"[E]", {num_experts}, logits.options()});
  TORCH_CHECK(groups >= 1 && num_experts % groups == 0 && (groups == 1 || num_experts / groups >= 2), op,
              ": num_groups must divide the ", num_experts,
              " experts into groups of two or more (or be 1), received ", groups);
  TORCH_CHECK(options.num_best_groups >= 1 && options.num_best_groups <= groups, op,
              ": num_best_groups must be from 1 to num_groups, ", groups, ", received ",
              options.num_best_groups);
  const int64_t most = options.num_best_groups * (num_experts / groups);
  TORCH_CHECK(options.top_k >= 1 && options.top_k <= most, op, ": top_k must be from 1 to ", most,
              ", the experts to choose from, received ", options.top_k);
}

/// Checks the `experts` argument of route, but not its values.
void check_routes(const at::Tensor& logits, const at::Tensor& experts, int64_t top_k) {
  detail::check_tensor("moe_route", "experts", experts,
                       {"[T, top_k]", {logits.sym_size(0), top_k}, logits.options().dtype(at::kLong)});
}

/// Does not check the values of routing.experts.
void check_moe(const at::Tensor& x, const Routing& routing) {
  const char* op = "moe";
  const auto& [weights, experts] = routing;
  detail::check_float(op, "x", x);
  detail::check_rank(op, "x", x, 2);
  detail::check_rank(op, "weights", weights, 2);
  TORCH_CHECK(x.size(0) > 0 && weights.size(1) > 0, op,
              ": expected x [T, C], T > 0, and weights [T, K], K > 0, received ", x.sizes(), " and ",
              weights.sizes());
  const c10::SymInt tokens = x.sym_size(0), top_k = weights.sym_size(1);
  detail::check_tensor(
      op, "weights", weights,
      {"[T, K]", {tokens, top_k}, x.options().dtype(detail::accumulator_dtype(x.scalar_type()))});
  detail::check_tensor(op, "experts", experts, {"[T, K]", {tokens, top_k}, x.options().dtype(at::kLong)});
}

void check_moe_experts(const at::Tensor& x, const ExpertWeights& experts) {
  const char* op = "moe";
  const at::Tensor &gate_up = experts.gate_up, &down = experts.down;
  detail::check_rank(op, "x", x, 2);
  detail::check_rank(op, "gate_up", gate_up, 3);
  detail::check_rank(op, "down", down, 3);
  detail::check_alike(op, "gate_up", gate_up, x);
  detail::check_alike(op, "down", down, x);
  const bool clamped = experts.clamped.has_value();
  const int64_t in = clamped ? 1 : 2, out = clamped ? 2 : 1;  // dimensions of both
  const int64_t count = gate_up.size(0), hidden = x.size(1), inner = gate_up.size(out);
  TORCH_CHECK(down.size(0) == count && inner == 2 * down.size(in) && gate_up.size(in) == hidden &&
                  down.size(out) == hidden,
              op, ": expected x [T, C], gate_up ", clamped ? "[E, C, 2 I]" : "[E, 2 I, C]", " and down ",
              clamped ? "[E, I, C]" : "[E, C, I]", ", received ", x.sizes(), ", ", gate_up.sizes(), " and ",
              down.sizes());
  if (clamped) detail::check_limit(op, experts.clamped->limit);
  detail::check_if_defined(op, "gate_up_bias", experts.gate_up_bias,
                           {"[E, 2 I]", {count, inner}, x.options()});
  detail::check_if_defined(op, "down_bias", experts.down_bias, {"[E, C]", {count, hidden}, x.options()});
}

at::Tensor router_scores(const at::Tensor& logits, const RouterOptions& options) {
  if (options.softmax_over_chosen) return logits;
  return options.sigmoid ? espalier::sigmoid(logits) : logits.softmax(-1);
}

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Scores with those outside the best groups masked.
at::Tensor mask_other_groups(const at::Tensor& scores, const RouterOptions& options) {
  const c10::SymInt tokens = scores.sym_size(0);
  const int64_t size = scores.sym_size(1).guard_int(__FILE__, __LINE__) / options.num_groups;
  const at::Tensor best_two = std::get<0>(scores.view_symint({tokens, options.num_groups, size}).topk(2, -1));
  const at::Tensor best = std::get<1>(best_two.sum(-1).topk(options.num_best_groups, -1));
  const at::Tensor is_out = at::ones_symint({tokens, options.num_groups}, scores.options().dtype(at::kBool))
                                .scatter_(1, best, false)
                                .repeat_interleave(size, 1);
  return scores.masked_fill(is_out, -std::numeric_limits<double>::infinity());
}

at::Tensor best_experts(const at::Tensor& scores, const std::optional<at::Tensor>& correction_bias,
                        const RouterOptions& options) {
  at::Tensor choice = correction_bias ? scores + *correction_bias : scores;
  if (options.num_groups > 1) choice = mask_other_groups(choice, options);
  return std::get<0>(std::get<1>(choice.topk(options.top_k, -1)).sort(-1));
}

/// Rows of tokens sorted by expert.
struct ExpertRows {
  at::Tensor token;  // [T top_k] int64: token of each row
  at::Tensor slot;   // [T top_k] int64: index of each row in the flat routing
  at::Tensor row;    // [T, top_k] int64: rows of each token
};

ExpertRows sort_by_expert(const at::Tensor& experts) {
  const at::Tensor flat = experts.flatten();
  ExpertRows rows;
  rows.slot = flat.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  rows.token = rows.slot.floor_divide(experts.size(1));
  rows.row = at::empty_like(flat)
                 .scatter_(0, rows.slot, at::arange(flat.size(0), flat.options()))
                 .view(experts.sizes());
  return rows;
}

/// [E] rows of each expert.
std::vector<int64_t> rows_per_expert(const at::Tensor& experts, int64_t num_experts) {
  const at::Tensor sizes = experts.flatten().bincount({}, num_experts).cpu();
  TORCH_CHECK(sizes.size(0) == num_experts, "moe: expected experts from 0 to ", num_experts - 1,
              ", received ", sizes.size(0) - 1);
  return {sizes.const_data_ptr<int64_t>(), sizes.const_data_ptr<int64_t>() + num_experts};
}

/// The sum of each token's rows, optionally weighted by `weights` [T, top_k], in the accumulator dtype.
at::Tensor sum_of_rows(const at::Tensor& rows, const at::Tensor& row, const at::Tensor& weights) {
  at::Tensor sum;
  for (int64_t j = 0; j < row.size(1); ++j) {
    at::Tensor part =
        rows.index_select(0, row.select(1, j)).to(detail::accumulator_dtype(rows.scalar_type()));
    if (weights.defined()) part = part * weights.narrow(1, j, 1);
    sum = sum.defined() ? sum.add_(part) : part;
  }
  return sum;
}

/// Copies x for each of its experts. Backward gathers instead of scattering, so that sums are deterministic
/// on every device.
class Dispatch : public Function<Dispatch> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& token,
                            const at::Tensor& row) {
    ctx->save_for_backward({row});
    return x.index_select(0, token);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor row = ctx->get_saved_variables()[0];
    return {sum_of_rows(grads[0], row, {}).to(grads[0].scalar_type()), {}, {}};
  }
};

class Combine : public Function<Combine> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& outputs, const at::Tensor& weights,
                            const ExpertRows& rows) {
    ctx->save_for_backward({outputs, weights, rows.token, rows.slot, rows.row});
    return sum_of_rows(outputs, rows.row, weights).to(outputs.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &outputs = saved[0], &weights = saved[1], &token = saved[2], &slot = saved[3];
    const at::Tensor grad = grads[0].to(weights.scalar_type());
    const at::Tensor weight_of_row = weights.flatten().index_select(0, slot).unsqueeze(1);
    at::Tensor grad_weights;
    if (ctx->needs_input_grad(1)) {
      std::vector<at::Tensor> columns;
      for (int64_t j = 0; j < weights.size(1); ++j) {
        columns.push_back((outputs.index_select(0, saved[4].select(1, j)) * grad).sum(-1));
      }
      grad_weights = at::stack(columns, 1);
    }
    return {(grad.index_select(0, token) * weight_of_row).to(outputs.scalar_type()), grad_weights, {}};
  }
};

std::tuple<at::Tensor, at::Tensor> route_op(const at::Tensor& logits, const TensorOrNone& correction_bias,
                                            const TensorOrNone& experts, const RouterOptions& options) {
  const Routing routing =
      route(logits, detail::if_defined(correction_bias), options, detail::if_defined(experts));
  return {routing.weights, routing.experts};
}

/// Splits a tensor by expert. Not with select, whose gradient is a full-size tensor per expert.
std::vector<at::Tensor> split_by_expert(const at::Tensor& all, int64_t count) {
  return all.defined() ? all.unbind() : std::vector<at::Tensor>(count);
}

}  // namespace

Routing route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
              const RouterOptions& options, const std::optional<at::Tensor>& experts) {
  check_route(logits, correction_bias, options);
  if (experts) check_routes(logits, *experts, options.top_k);
  const at::Tensor scores = router_scores(logits, options);
  at::Tensor chosen = best_experts(scores.detach(), correction_bias, options);
  if (experts) chosen = at::where(*experts >= 0, *experts, chosen);
  at::Tensor weights = scores.gather(1, chosen);
  if (options.softmax_over_chosen) weights = weights.softmax(-1);
  if (options.normalise) weights = weights / (weights.sum(-1, /*keepdim=*/true) + 1e-20);
  if (options.scaling != 1) weights = weights * options.scaling;
  return {weights, chosen};
}

at::Tensor moe(const at::Tensor& x, const Routing& routing, int64_t num_experts,
               const ExpertFunction& expert) {
  check_moe(x, routing);
  const ExpertRows rows = sort_by_expert(routing.experts);
  const std::vector<int64_t> sizes = rows_per_expert(routing.experts, num_experts);
  const std::vector<at::Tensor> inputs = Dispatch::apply(x, rows.token, rows.row).split_with_sizes(sizes);
  std::vector<at::Tensor> outputs;
  for (int64_t i = 0; i < num_experts; ++i) {
    if (sizes[i] > 0) outputs.push_back(expert(i, inputs[i]));
  }
  return Combine::apply(at::cat(outputs), routing.weights, rows);
}

at::Tensor grouped_moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts) {
  check_moe(x, routing);
  check_moe_experts(x, experts);
  const ExpertRows rows = sort_by_expert(routing.experts);
  const at::Tensor expert_of_row = routing.experts.flatten().index_select(0, rows.slot);
  const at::Tensor number = at::arange(experts.gate_up.size(0), expert_of_row.options());
  const at::Tensor ends = at::searchsorted(expert_of_row, number, /*out_int32=*/true, /*right=*/true);
  const auto product = [&](const at::Tensor& inputs, const at::Tensor& weight, const at::Tensor& bias) {
    const at::Tensor result = at::_grouped_mm(inputs, weight, ends);
    return bias.defined() ? result + bias.index_select(0, expert_of_row) : result;
  };
  const auto weight = [&](const at::Tensor& all) { return experts.clamped ? all : all.transpose(1, 2); };
  const at::Tensor inputs = Dispatch::apply(x, rows.token, rows.row);
  const at::Tensor inner = product(inputs, weight(experts.gate_up), experts.gate_up_bias);
  at::Tensor active;
  if (experts.clamped) {
    active = clamped_swiglu(inner, experts.clamped->alpha, experts.clamped->limit);
  } else {
    const std::vector<at::Tensor> halves = inner.chunk(2, -1);
    active = swiglu(halves[0].contiguous(), halves[1].contiguous());
  }
  return Combine::apply(product(active, weight(experts.down), experts.down_bias), routing.weights, rows);
}

at::Tensor moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts) {
  check_moe_experts(x, experts);
  // Grouped products take rows of whole 16 bytes.
  const bool is_aligned = x.size(1) % 8 == 0 && experts.gate_up.size(experts.clamped ? 2 : 1) % 16 == 0;
  if (x.is_cuda() && x.scalar_type() == at::kBFloat16 && is_aligned) return grouped_moe(x, routing, experts);
  const int64_t count = experts.gate_up.size(0);
  const std::vector<at::Tensor> gate_ups = experts.gate_up.unbind(), downs = experts.down.unbind();
  const std::vector<at::Tensor> gate_up_biases = split_by_expert(experts.gate_up_bias, count);
  const std::vector<at::Tensor> down_biases = split_by_expert(experts.down_bias, count);
  return moe(x, routing, count, [&](int64_t e, const at::Tensor& rows) {
    const std::optional<at::Tensor> gate_up_bias = detail::if_defined(gate_up_biases[e]),
                                    down_bias = detail::if_defined(down_biases[e]);
    if (experts.clamped) {
      const at::Tensor inner = at::linear(rows, gate_ups[e].t(), gate_up_bias);
      const auto [alpha, limit] = *experts.clamped;
      return at::linear(clamped_swiglu(inner, alpha, limit), downs[e].t(), down_bias);
    }
    const std::vector<at::Tensor> inner = at::linear(rows, gate_ups[e], gate_up_bias).chunk(2, -1);
    return at::linear(swiglu(inner[0], inner[1]), downs[e], down_bias);
  });
}

TORCH_LIBRARY_IMPL(espalier, CompositeImplicitAutograd, m) {
  m.impl("moe_route", detail::kKernel<&route_op>);
}

}  // namespace espalier
