#include "espalier/ops/reference.h"

#include <ATen/ATen.h>

#include <limits>

#include "espalier/ops/checks.h"

namespace espalier::reference {

at::Tensor visibility_mask(const at::Tensor& subtree_end) {
  const at::Tensor token = at::arange(subtree_end.size(0), subtree_end.options());
  const at::Tensor row = token.unsqueeze(1);
  return row.ge(token).logical_and(row.lt(subtree_end));
}

at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& subtree_end, double softmax_scale) {
  detail::check_tree_attention(q, k, v, subtree_end);
  const int64_t group = q.size(1) / k.size(1);
  const at::Tensor q_HTD = q.transpose(0, 1);
  const at::Tensor k_HTD = k.transpose(0, 1).repeat_interleave(group, 0);
  const at::Tensor v_HTD = v.transpose(0, 1).repeat_interleave(group, 0);
  const at::Tensor scores =
      q_HTD.matmul(k_HTD.transpose(1, 2))
          .mul(softmax_scale)
          .masked_fill(visibility_mask(subtree_end).logical_not(), -std::numeric_limits<double>::infinity());
  return scores.softmax(-1).matmul(v_HTD).transpose(0, 1);
}

at::Tensor edge_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& edge_row,
                         const at::Tensor& edge_target) {
  detail::check_edge_logprobs(hidden, weight, edge_row, edge_target);
  const at::Tensor logits = hidden.matmul(weight.t());
  const at::Tensor logprobs = logits.log_softmax(-1, detail::accumulator_dtype(hidden.scalar_type()));
  return logprobs.index({edge_row, edge_target});
}

}  // namespace espalier::reference
