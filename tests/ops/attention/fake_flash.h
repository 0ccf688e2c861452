// SPDX-License-Identifier: Apache-2.0
// ATen's varlen flash attention, played on the CPU: what aten::_flash_attention_forward and _backward take
// and return there is as on CUDA (flash_api.cpp: mha_varlen_fwd, mha_varlen_bwd), but each sequence is
// computed densely in the dtype of sums, so float64 is exact.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "espalier/ops/checks.h"

namespace espalier::testing {

namespace fake_flash {

/// The conditions under which the kernels may be called; they check some and read garbage for the others.
inline void check_operand(const at::Tensor& tensor, at::ScalarType dtype) {
  TORCH_CHECK(tensor.dim() == 3 && tensor.is_contiguous() && tensor.scalar_type() == dtype);
  TORCH_CHECK(tensor.size(2) % 8 == 0 && tensor.size(2) <= 256, "head dimension ", tensor.size(2));
  TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, "misaligned");
}

inline void check_offsets(const at::Tensor& offsets, int64_t total, int64_t longest) {
  TORCH_CHECK(offsets.dim() == 1 && offsets.scalar_type() == at::kInt && offsets.is_contiguous());
  TORCH_CHECK(offsets[0].item<int>() == 0 && offsets[-1].item<int>() == total);
  TORCH_CHECK(offsets.diff().max().item<int>() <= longest, "a sequence is longer than the longest");
}

/// One sequence, all query heads: q [H, rows, D], k and v [H, columns, D] in the dtype of sums.
struct Sequence {
  at::Tensor rows, columns;  // index ranges
  at::Tensor q, k, v, scores;
  int64_t group;

  Sequence(const at::Tensor& q_all, const at::Tensor& k_all, const at::Tensor& v_all, at::Tensor row_index,
           at::Tensor column_index, bool causal, double scale)
      : rows(std::move(row_index)), columns(std::move(column_index)), group(q_all.size(1) / k_all.size(1)) {
    const auto dtype = espalier::detail::accumulator_dtype(q_all.scalar_type());
    q = q_all.index_select(0, rows).to(dtype).transpose(0, 1);
    k = k_all.index_select(0, columns).to(dtype).transpose(0, 1).repeat_interleave(group, 0);
    v = v_all.index_select(0, columns).to(dtype).transpose(0, 1).repeat_interleave(group, 0);
    scores = q.matmul(k.transpose(1, 2)).mul(scale);
    if (causal) {  // aligned at the last row and column, as in version 2 of the kernels
      const at::Tensor visible =
          at::ones({rows.size(0), columns.size(0)}, at::kBool).tril(columns.size(0) - rows.size(0));
      scores = scores.masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity());
    }
  }
  /// Gradients of the group's copies of a key head add up.
  at::Tensor per_key_head(const at::Tensor& gradient) const {
    return gradient.view({-1, group, gradient.size(1), gradient.size(2)}).sum(1).transpose(0, 1);
  }
};

template <class Work>
void for_each_sequence(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& row_offsets, const at::Tensor& column_offsets, bool causal,
                       double scale, const Work& work) {
  const auto range = [](const at::Tensor& offsets, int64_t s) {
    return at::arange(offsets[s].item<int64_t>(), offsets[s + 1].item<int64_t>());
  };
  for (int64_t s = 0; s + 1 < row_offsets.size(0); ++s) {
    const Sequence sequence(q, k, v, range(row_offsets, s), range(column_offsets, s), causal, scale);
    TORCH_CHECK(sequence.rows.size(0) > 0 && sequence.columns.size(0) > 0, "a sequence is empty");
    work(sequence);
  }
}

using OptionalTensor = std::optional<at::Tensor>;
using OptionalSize = std::optional<c10::SymInt>;

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& row_offsets,
    const OptionalTensor& column_offsets, c10::SymInt longest_rows, c10::SymInt longest_columns,
    double dropout, bool causal, bool debug, std::optional<double> scale, OptionalSize left,
    OptionalSize right, const OptionalTensor& used, const OptionalTensor& slopes) {
  for (const at::Tensor& tensor : {q, k, v}) check_operand(tensor, q.scalar_type());
  check_offsets(*row_offsets, q.size(0), longest_rows.expect_int());
  check_offsets(*column_offsets, k.size(0), longest_columns.expect_int());
  TORCH_CHECK(dropout == 0 && !debug && scale && !left && !right && !used && !slopes);
  TORCH_CHECK(longest_rows > 1, "the shortcut for sequences of one row is not played");
  const at::Tensor out = at::empty_like(q);
  const at::Tensor lse = at::empty({q.size(1), q.size(0)},
                                   q.options().dtype(espalier::detail::accumulator_dtype(q.scalar_type())));
  for_each_sequence(q, k, v, *row_offsets, *column_offsets, causal, *scale, [&](const Sequence& s) {
    out.index_copy_(0, s.rows, s.scores.softmax(-1).matmul(s.v).transpose(0, 1).to(q.scalar_type()));
    lse.index_copy_(1, s.rows, s.scores.logsumexp(-1));
  });
  const auto state = q.options().dtype(at::kUInt64);
  return {out, lse, at::empty({2}, state), at::empty({}, state), at::empty({0}, q.options())};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& row_offsets,
    const at::Tensor& column_offsets, c10::SymInt longest_rows, c10::SymInt longest_columns, double dropout,
    bool causal, const at::Tensor& state, const at::Tensor& unused, std::optional<double> scale,
    OptionalSize left, OptionalSize right) {
  for (const at::Tensor& tensor : {grad_out, q, k, v, out}) check_operand(tensor, q.scalar_type());
  check_offsets(row_offsets, q.size(0), longest_rows.expect_int());
  check_offsets(column_offsets, k.size(0), longest_columns.expect_int());
  const auto sums = espalier::detail::accumulator_dtype(q.scalar_type());
  TORCH_CHECK(lse.is_contiguous() && lse.sizes() == at::IntArrayRef({q.size(1), q.size(0)}) &&
              lse.scalar_type() == sums);
  TORCH_CHECK(dropout == 0 && state.defined() && unused.defined() && scale && !left && !right);
  const at::Tensor grad_q = at::empty_like(q), grad_k = at::empty_like(k), grad_v = at::empty_like(v);
  for_each_sequence(q, k, v, row_offsets, column_offsets, causal, *scale, [&](const Sequence& s) {
    const auto of_rows = [&](const at::Tensor& tensor) {
      return tensor.index_select(0, s.rows).to(sums).transpose(0, 1);
    };
    const at::Tensor grad = of_rows(grad_out);
    const at::Tensor delta = grad.mul(of_rows(out)).sum(-1, true);
    const at::Tensor p = (s.scores - lse.index_select(1, s.rows).unsqueeze(-1)).exp();
    const at::Tensor grad_scores = p * (grad.matmul(s.v.transpose(1, 2)) - delta) * *scale;
    const auto put = [&](const at::Tensor& all, const at::Tensor& index, const at::Tensor& part) {
      all.index_copy_(0, index, part.to(all.scalar_type()));
    };
    put(grad_q, s.rows, grad_scores.matmul(s.k).transpose(0, 1));
    put(grad_k, s.columns, s.per_key_head(grad_scores.transpose(1, 2).matmul(s.q)));
    put(grad_v, s.columns, s.per_key_head(p.transpose(1, 2).matmul(grad)));
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace fake_flash

/// Registers the two operators for the CPU while it lives.
class FakeFlash {
 public:
  FakeFlash() : library_(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__) {
    library_.impl("_flash_attention_forward", &fake_flash::forward);
    library_.impl("_flash_attention_backward", &fake_flash::backward);
  }

 private:
  torch::Library library_;
};

}  // namespace espalier::testing
