// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/checks.h"

namespace espalier::detail {
namespace {

void check_float(const char* op, const char* name, const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16, op, ": ", name,
              " must be float64, float32 or bfloat16, received ", dtype);
}

void check_rank(const char* op, const char* name, const at::Tensor& tensor, int64_t rank) {
  TORCH_CHECK(tensor.dim() == rank, op, ": ", name, " must have ", rank, " dimensions, received shape ",
              tensor.sym_sizes());
}

void check_alike(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& first) {
  TORCH_CHECK(tensor.scalar_type() == first.scalar_type(), op, ": ", name, " must be ", first.scalar_type(),
              " as the first argument is, received ", tensor.scalar_type());
  TORCH_CHECK(tensor.device() == first.device(), op, ": ", name, " must be on ", first.device(),
              ", received ", tensor.device());
}

void check_index(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                 const at::Tensor& first) {
  check_rank(op, name, tensor, 1);
  TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", name, " must be ", dtype, ", received ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.device() == first.device(), op, ": ", name, " must be on ", first.device(),
              ", received ", tensor.device());
}

void check_limit(const char* op, double limit) {
  TORCH_CHECK(limit > 0, op, ": the limit must be above 0, received ", limit);
}

}  // namespace

void check_tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& subtree_end) {
  const char* op = "tree_attention";
  const bool half = q.scalar_type() == at::kHalf;
  TORCH_CHECK(!half || !q.device().is_cpu(), op,
              ": float16 needs a GPU; on the CPU q must be float64, float32 or bfloat16");
  if (!half) check_float(op, "q", q);
  check_rank(op, "q", q, 3);
  check_rank(op, "k", k, 3);
  check_alike(op, "k", k, q);
  check_alike(op, "v", v, q);
  check_index(op, "subtree_end", subtree_end, at::kInt, q);
  TORCH_CHECK(k.sym_size(0) == q.sym_size(0) && k.sym_size(2) == q.sym_size(2) && q.sym_size(2) > 0, op,
              ": k must be [T, K, D] where q is [T, H, D], D > 0, received q ", q.sym_sizes(), " and k ",
              k.sym_sizes());
  TORCH_CHECK(v.sym_sizes() == k.sym_sizes(), op, ": v must have the shape of k, ", k.sym_sizes(),
              ", received ", v.sym_sizes());
  TORCH_CHECK(k.sym_size(1) > 0 && q.sym_size(1) > 0 && q.sym_size(1) % k.sym_size(1) == 0, op,
              ": the query heads must be a multiple of the key heads, received ", q.sym_size(1), " and ",
              k.sym_size(1));
  TORCH_CHECK(subtree_end.sym_size(0) == q.sym_size(0), op, ": subtree_end must have one entry for each of ",
              q.sym_size(0), " tokens, received ", subtree_end.sym_size(0));
}

void check_attention_context(const at::Tensor& k, at::TensorList context_k, at::TensorList context_v,
                             const at::Tensor& context_blocks) {
  const char* op = "tree_attention";
  TORCH_CHECK(context_k.size() == context_v.size(), op,
              ": context_k and context_v must have one tensor per segment, received ", context_k.size(),
              " and ", context_v.size());
  for (size_t s = 0; s < context_k.size(); ++s) {
    check_rank(op, "context_k", context_k[s], 3);
    check_alike(op, "context_k", context_k[s], k);
    check_alike(op, "context_v", context_v[s], k);
    TORCH_CHECK(context_k[s].sym_size(1) == k.sym_size(1) && context_k[s].sym_size(2) == k.sym_size(2), op,
                ": context_k must be [S, K, D] where k is [T, K, D], received ", context_k[s].sym_sizes(),
                " and k ", k.sym_sizes());
    TORCH_CHECK(context_v[s].sym_sizes() == context_k[s].sym_sizes(), op,
                ": context_v must have the shape of context_k, ", context_k[s].sym_sizes(), ", received ",
                context_v[s].sym_sizes());
  }
  check_rank(op, "context_blocks", context_blocks, 2);
  TORCH_CHECK(context_blocks.scalar_type() == at::kLong && context_blocks.device().is_cpu() &&
                  context_blocks.sym_size(1) == 5,
              op, ": context_blocks must be [P, 5] int64 on the CPU, received ", context_blocks.sym_sizes(),
              " ", context_blocks.scalar_type(), " on ", context_blocks.device());
}

void check_edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target) {
  const char* op = "edge_logprobs";
  check_float(op, "hidden", hidden);
  check_rank(op, "hidden", hidden, 2);
  check_rank(op, "weight", weight, 2);
  check_alike(op, "weight", weight, hidden);
  check_index(op, "edge_row", edge_row, at::kLong, hidden);
  check_index(op, "edge_target", edge_target, at::kLong, hidden);
  TORCH_CHECK(hidden.sym_size(1) == weight.sym_size(1) && weight.sym_size(0) > 0, op,
              ": expected hidden [R, C] and weight [V, C], V > 0, received ", hidden.sym_sizes(), " and ",
              weight.sym_sizes());
  TORCH_CHECK(edge_row.sym_size(0) == edge_target.sym_size(0), op,
              ": edge_row and edge_target must be of one length, received ", edge_row.sym_size(0), " and ",
              edge_target.sym_size(0));
}

void check_head_gradient(const at::Tensor& weight, const std::optional<at::Tensor>& grad_weight) {
  const auto dtype = accumulator_dtype(weight.scalar_type());
  TORCH_CHECK(
      !grad_weight || (grad_weight->sizes() == weight.sizes() && grad_weight->scalar_type() == dtype &&
                       grad_weight->device() == weight.device()),
      "edge_logprobs_backward_: expected grad_weight ", weight.sizes(), " ", dtype, " on ", weight.device(),
      ", received ", grad_weight->sizes(), " ", grad_weight->scalar_type(), " on ", grad_weight->device());
}

void check_rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& other, const at::Tensor& weight) {
  const char* op = "rms_norm";
  check_float(op, "x", x);
  check_rank(op, "weight", weight, 1);
  check_alike(op, "weight", weight, x);
  TORCH_CHECK(x.dim() > 0 && x.sym_size(-1) == weight.sym_size(0), op,
              ": expected x [..., C] and weight [C], received ", x.sym_sizes(), " and ", weight.sym_sizes());
  if (!other || !other->defined()) return;
  check_alike(op, "addend or gradient", *other, x);
  TORCH_CHECK(other->sym_sizes() == x.sym_sizes(), op, ": expected an addend or gradient of the shape of x, ",
              x.sym_sizes(), ", received ", other->sym_sizes());
}

void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const char* op = "rotary";
  check_float(op, "x", x);
  check_rank(op, "x", x, 3);
  for (const at::Tensor& table : {cos, sin}) {
    check_rank(op, "cos or sin", table, 2);
    TORCH_CHECK(table.sym_size(0) == x.sym_size(0) && table.sym_size(1) * 2 == x.sym_size(2) &&
                    table.scalar_type() == accumulator_dtype(x.scalar_type()) && table.device() == x.device(),
                op, ": expected x [T, H, D] and cos and sin [T, D/2] ", accumulator_dtype(x.scalar_type()),
                " on its device, received ", x.sym_sizes(), " and ", table.sym_sizes(), " ",
                table.scalar_type());
  }
}

void check_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const char* op = "swiglu";
  check_float(op, "gate", gate);
  check_alike(op, "up or gradient", up, gate);
  TORCH_CHECK(up.sym_sizes() == gate.sym_sizes(), op, ": expected an up or gradient of the shape of gate, ",
              gate.sym_sizes(), ", received ", up.sym_sizes());
}

void check_clamped_swiglu(const at::Tensor& gate_up, double limit) {
  const char* op = "clamped_swiglu";
  check_float(op, "gate_up", gate_up);
  check_rank(op, "gate_up", gate_up, 2);
  TORCH_CHECK(gate_up.size(1) % 2 == 0, op, ": expected gate_up [R, 2 I], received ", gate_up.sizes());
  check_limit(op, limit);
}

void check_route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
                 const RouterOptions& options) {
  const char* op = "moe_route";
  check_rank(op, "logits", logits, 2);
  TORCH_CHECK(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble, op,
              ": logits must be float32 or float64, received ", logits.scalar_type());
  TORCH_CHECK(!(options.sigmoid && options.softmax_over_chosen), op,
              ": expected sigmoid or softmax_over_chosen, received both");
  const int64_t num_experts = logits.sym_size(1).guard_int(__FILE__, __LINE__), groups = options.num_groups;
  if (correction_bias) {
    check_alike(op, "correction_bias", *correction_bias, logits);
    TORCH_CHECK(correction_bias->dim() == 1 && correction_bias->sym_size(0) == num_experts, op,
                ": expected logits [T, E] and correction_bias [E], received ", logits.sym_sizes(), " and ",
                correction_bias->sym_sizes());
  }
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
  TORCH_CHECK(
      experts.dim() == 2 && experts.sym_size(0) == logits.sym_size(0) && experts.sym_size(1) == top_k &&
          experts.scalar_type() == at::kLong && experts.device() == logits.device(),
      "moe_route: expected experts [", logits.sym_size(0), ", ", top_k, "] int64 on ", logits.device(),
      ", received ", experts.sym_sizes(), " ", experts.scalar_type(), " on ", experts.device());
}

void check_moe(const at::Tensor& x, const Routing& routing) {
  const char* op = "moe";
  check_float(op, "x", x);
  check_rank(op, "x", x, 2);
  const at::Tensor &weights = routing.weights, &experts = routing.experts;
  const at::ScalarType dtype = accumulator_dtype(x.scalar_type());
  TORCH_CHECK(x.size(0) > 0 && weights.dim() == 2 && weights.size(0) == x.size(0) && weights.size(1) > 0 &&
                  weights.sizes() == experts.sizes(),
              op, ": expected x [T, C], T > 0, and weights and experts [T, K], K > 0, received ", x.sizes(),
              ", ", weights.sizes(), " and ", experts.sizes());
  TORCH_CHECK(weights.scalar_type() == dtype && experts.scalar_type() == at::kLong &&
                  weights.device() == x.device() && experts.device() == x.device(),
              op, ": expected weights ", dtype, " and experts int64 on ", x.device(), ", received ",
              weights.scalar_type(), " on ", weights.device(), " and ", experts.scalar_type(), " on ",
              experts.device());
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
  if (experts.gate_up_bias.defined())
    check_tensor(op, "gate_up_bias", experts.gate_up_bias, {"[E, 2 I]", {count, inner}, x.options()});
  if (experts.down_bias.defined())
    check_tensor(op, "down_bias", experts.down_bias, {"[E, C]", {count, hidden}, x.options()});
}

void check_tensor(const char* op, const char* name, const at::Tensor& tensor,
                  const ExpectedTensor& expected) {
  const auto& [shape, sizes, options] = expected;
  TORCH_CHECK(tensor.sizes() == sizes && tensor.scalar_type() == options.dtype() &&
                  tensor.device() == options.device(),
              op, ": ", name, " must be ", shape, " ", sizes, " ", options.dtype(), " on ", options.device(),
              ", received ", tensor.sizes(), " ", tensor.scalar_type(), " on ", tensor.device());
}

at::ScalarType accumulator_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace espalier::detail
