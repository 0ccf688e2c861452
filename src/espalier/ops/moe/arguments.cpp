// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/moe/arguments.h"

#include "espalier/ops/checks.h"

namespace espalier::detail {

void check_route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
                 const RouterOptions& options) {
  const char* op = "moe_route";
  check_rank(op, "logits", logits, 2);
  TORCH_CHECK(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble, op,
              ": logits must be float32 or float64, received ", logits.scalar_type());
  TORCH_CHECK(!(options.sigmoid && options.softmax_over_chosen), op,
              ": expected sigmoid or softmax_over_chosen, received both");
  const int64_t num_experts = logits.sym_size(1).guard_int(__FILE__, __LINE__), groups = options.num_groups;
  check_if_defined(op, "correction_bias", correction_bias.value_or(at::Tensor()),
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

void check_routes(const at::Tensor& logits, const at::Tensor& experts, int64_t top_k) {
  check_tensor("moe_route", "experts", experts,
               {"[T, top_k]", {logits.sym_size(0), top_k}, logits.options().dtype(at::kLong)});
}

void check_moe(const at::Tensor& x, const Routing& routing) {
  const char* op = "moe";
  const auto& [weights, experts] = routing;
  check_float(op, "x", x);
  check_rank(op, "x", x, 2);
  check_rank(op, "weights", weights, 2);
  TORCH_CHECK(x.size(0) > 0 && weights.size(1) > 0, op,
              ": expected x [T, C], T > 0, and weights [T, K], K > 0, received ", x.sizes(), " and ",
              weights.sizes());
  const c10::SymInt tokens = x.sym_size(0), top_k = weights.sym_size(1);
  check_tensor(op, "weights", weights,
               {"[T, K]", {tokens, top_k}, x.options().dtype(accumulator_dtype(x.scalar_type()))});
  check_tensor(op, "experts", experts, {"[T, K]", {tokens, top_k}, x.options().dtype(at::kLong)});
}

void check_moe_experts(const at::Tensor& x, const ExpertWeights& experts) {
  const char* op = "moe";
  const at::Tensor &gate_up = experts.gate_up, &down = experts.down;
  check_rank(op, "x", x, 2);
  check_rank(op, "gate_up", gate_up, 3);
  check_rank(op, "down", down, 3);
  check_alike(op, "gate_up", gate_up, x);
  check_alike(op, "down", down, x);
  const bool clamped = experts.clamped.has_value();
  const int64_t in = clamped ? 1 : 2, out = clamped ? 2 : 1;  // dimensions of both
  const int64_t count = gate_up.size(0), hidden = x.size(1), inner = gate_up.size(out);
  TORCH_CHECK(down.size(0) == count && inner == 2 * down.size(in) && gate_up.size(in) == hidden &&
                  down.size(out) == hidden,
              op, ": expected x [T, C], gate_up ", clamped ? "[E, C, 2 I]" : "[E, 2 I, C]", " and down ",
              clamped ? "[E, I, C]" : "[E, C, I]", ", received ", x.sizes(), ", ", gate_up.sizes(), " and ",
              down.sizes());
  if (clamped) check_limit(op, experts.clamped->limit);
  check_if_defined(op, "gate_up_bias", experts.gate_up_bias, {"[E, 2 I]", {count, inner}, x.options()});
  check_if_defined(op, "down_bias", experts.down_bias, {"[E, C]", {count, hidden}, x.options()});
}

}  // namespace espalier::detail
