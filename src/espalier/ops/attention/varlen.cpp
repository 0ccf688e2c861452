// SPDX-License-Identifier: Apache-2.0
// Blocks of a level have disjoint rows and columns, so they form the sequences of one call: first all
// triangles, then the rectangles level by level.
//
// Forward: a row has one triangle and at most one rectangle per level, with partial results (O_s, lse_s);
// lse = logsumexp_s lse_s and O = sum_s exp(lse_s - lse) O_s (docs/math.md).
//
// Backward: given the global O and lse, a call yields its exact contribution to dQ, dK and dV.
// Rows and columns of a call are ranges with gaps; context columns come in any order. Unless they form one
// range, they are gathered. The copy is small compared to merging, deep levels cost in proportion to their
// rows, and no sequence is empty.
#include "espalier/ops/attention/varlen.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <span>

#include "espalier/ops/checks.h"

namespace espalier::varlen {
namespace {

// Levels of the tokens' blocks, triangles first, then of context blocks; columns index all keys.
std::vector<std::vector<MaskBlock>> blocks_of(const detail::TreeAttentionArguments& arguments,
                                              const detail::AllKeys& keys) {
  const at::Tensor ends = arguments.tokens.subtree_end.to(at::kCPU).contiguous();
  auto levels = mask_blocks_by_level({ends.const_data_ptr<int32_t>(), static_cast<size_t>(ends.numel())});
  auto context_levels = detail::context_levels(arguments.context, ends.numel());
  std::vector<int64_t> segment_begins;
  for (int64_t begin = 0; const int64_t length : keys.lengths) {
    segment_begins.push_back(begin);
    begin += length;
  }
  std::move(context_levels.begin(), context_levels.end(), std::back_inserter(levels));
  for (auto& level : levels) {
    for (MaskBlock& block : level) {
      const int64_t begin = block.segment < 0 ? keys.own_begin() : segment_begins[block.segment];
      block.column_begin += begin;
      block.column_end += begin;
    }
  }
  return levels;
}

struct Range {
  int64_t begin, end;
};

/// The rows, or columns, of a call.
struct Axis {
  int64_t count = 0;     // of sequences
  bool is_range = true;  // the sequences partition one contiguous range, in order
  int64_t begin = 0;     // of that range
  int64_t length = 0;    // total length
  int64_t longest = 0;   // of one
  int64_t numbers = 0;   // index of its offsets, followed by its shifts, in `numbers`
};

/// Appends an axis to `numbers`: the offsets of its sequences and, for each, begin of its range minus offset.
Axis append_axis(std::vector<int32_t>& numbers, const std::vector<Range>& ranges) {
  Axis axis;
  axis.count = static_cast<int64_t>(ranges.size());
  axis.numbers = static_cast<int64_t>(numbers.size());
  axis.begin = ranges.front().begin;
  std::vector<int32_t> shifts;
  for (const Range& range : ranges) {
    axis.is_range &= range.begin == axis.begin + axis.length;
    numbers.push_back(static_cast<int32_t>(axis.length));
    shifts.push_back(static_cast<int32_t>(range.begin - axis.length));
    axis.length += range.end - range.begin;
    axis.longest = std::max(axis.longest, range.end - range.begin);
  }
  numbers.push_back(static_cast<int32_t>(axis.length));
  numbers.insert(numbers.end(), shifts.begin(), shifts.end());
  return axis;
}

/// Selects the rows of a call: a view if they are one range, otherwise a copy.
class Selection {
 public:
  Selection(const Axis& axis, const at::Tensor& numbers)
      : range_{axis.begin, axis.begin + axis.length},
        offsets_(numbers.slice(0, axis.numbers, axis.numbers + axis.count + 1)) {
    if (axis.is_range) return;
    const int64_t begin = axis.numbers + axis.count + 1;
    const at::Tensor shifts = numbers.slice(0, begin, begin + axis.count);
    // std::optional selects the overload that returns indices; passing the length avoids a synchronisation.
    const at::Tensor sequence = at::repeat_interleave(offsets_.diff(), std::optional(axis.length));
    index_ = at::arange(axis.length, numbers.options().dtype(at::kLong)) + shifts.index_select(0, sequence);
  }

  const at::Tensor& offsets() const { return offsets_; }

  at::Tensor of(const at::Tensor& all, int64_t dim = 0) const {
    return index_.defined() ? all.index_select(dim, index_) : all.slice(dim, range_.begin, range_.end);
  }
  /// Writes back the result of of(); no-op for a view.
  void put(const at::Tensor& all, const at::Tensor& part, int64_t dim = 0) const {
    if (index_.defined()) all.index_copy_(dim, index_, part);
  }
  void add(const at::Tensor& all, const at::Tensor& part) const {
    if (index_.defined()) {  // rows are distinct, so the result is deterministic
      all.index_add_(0, index_, part.to(all.scalar_type()));
    } else {
      of(all).add_(part);
    }
  }

 private:
  Range range_;
  at::Tensor offsets_;
  at::Tensor index_;  // undefined: the range
};

struct CallShape {
  Axis rows, columns;
  bool causal;
};

/// The calls of a tree attention and their inputs.
struct AttentionCalls {
  at::ScalarType dtype;
  at::Tensor q;
  double softmax_scale;
  detail::AllKeys keys;
  std::vector<CallShape> calls;
  at::Tensor numbers;  // int32, on the device

  AttentionCalls(const SequenceAttention& attention, const detail::TreeAttentionArguments& arguments)
      : dtype(attention.dtype(arguments.q.scalar_type())),
        q(given(arguments.q)),
        softmax_scale(arguments.options.softmax_scale),
        keys(arguments, dtype) {
    TORCH_CHECK(arguments.options.sliding_window == 0,
                "attention by blocks of the mask: expected no sliding_window, received ",
                arguments.options.sliding_window);
    const auto most = static_cast<size_t>(attention.max_sequences(q.size(1), q.size(2)));
    std::vector<int32_t> all_numbers;
    for (const std::vector<MaskBlock>& level : blocks_of(arguments, keys)) {
      for (size_t begin = 0; begin < level.size(); begin += most) {
        append_call(std::span(level).subspan(begin, std::min(most, level.size() - begin)), all_numbers);
      }
    }
    numbers = at::tensor(all_numbers, at::kInt).to(q.device());
  }

  at::Tensor given(const at::Tensor& tensor) const { return tensor.to(dtype).contiguous(); }

  /// Calls work(inputs, sequences, rows, columns) for each call.
  template <class Work>
  void for_each_call(const Work& work) const {
    for (const CallShape& call : calls) {
      const Selection rows(call.rows, numbers), columns(call.columns, numbers);
      const PackedSequences sequences{rows.offsets(), columns.offsets(), call.rows.longest,
                                      call.columns.longest, call.causal};
      work(SequenceInputs{rows.of(q), columns.of(keys.k), columns.of(keys.v), softmax_scale}, sequences, rows,
           columns);
    }
  }

 private:
  void append_call(std::span<const MaskBlock> blocks, std::vector<int32_t>& all_numbers) {
    std::vector<Range> rows, columns;
    for (const MaskBlock& block : blocks) {
      rows.push_back({block.row_begin, block.row_end});
      columns.push_back({block.column_begin, block.column_end});
    }
    const Axis row_axis = append_axis(all_numbers, rows);
    calls.push_back({row_axis, append_axis(all_numbers, columns), blocks.front().causal});
  }
};

void merge(const AttentionResult& all, const AttentionResult& part, const Selection& rows) {
  const at::Tensor out = rows.of(all.out), old_lse = rows.of(all.lse, 1);
  const at::Tensor lse = at::logaddexp(old_lse, part.lse);
  const auto weight = [&](const at::Tensor& share) {
    return share.sub(lse).exp_().t().unsqueeze(-1);  // [rows, H, 1]
  };
  out.mul_(weight(old_lse)).addcmul_(part.out.to(out.scalar_type()), weight(part.lse));
  old_lse.copy_(lse);
  rows.put(all.out, out);
  rows.put(all.lse, old_lse, 1);
}

// A sink is a block of one key with value 0.
void add_sinks(AttentionResult& all, const at::Tensor& sinks) {
  const at::Tensor lse = at::logaddexp(all.lse, sinks.to(all.lse.scalar_type()).unsqueeze(-1));
  const at::Tensor weight = all.lse.sub(lse).exp_().t().unsqueeze(-1);  // [rows, H, 1]
  all = {all.out.to(lse.scalar_type()).mul(weight), lse};
}

}  // namespace

detail::TreeAttentionResults tree_attention(const SequenceAttention& attention,
                                            const detail::TreeAttentionArguments& arguments) {
  const AttentionCalls calls(attention, arguments);
  const auto sums = calls.q.options().dtype(detail::accumulator_dtype(calls.dtype));
  AttentionResult all;
  calls.for_each_call([&](const SequenceInputs& inputs, const PackedSequences& sequences,
                          const Selection& rows, const Selection&) {
    const AttentionResult part = attention.forward(inputs, sequences);
    if (calls.calls.size() == 1) {
      all = part;
      return;
    }
    if (!all.out.defined()) {
      all = {at::empty(calls.q.sizes(), sums), at::empty({calls.q.size(1), calls.q.size(0)}, sums)};
    }
    if (sequences.causal) {  // the triangles come first and cover every row exactly once
      rows.of(all.out).copy_(part.out);
      rows.of(all.lse, 1).copy_(part.lse);
    } else {
      merge(all, part, rows);
    }
  });
  if (calls.calls.empty()) {  // no tokens
    all = {at::empty(calls.q.sizes(), sums), at::empty({calls.q.size(1), 0}, sums)};
  }
  if (arguments.options.sinks.defined()) add_sinks(all, arguments.options.sinks);
  // lse with the strides of other implementations.
  return {all.out.to(arguments.q.scalar_type()),
          at::empty({calls.q.size(0), calls.q.size(1)}, sums).t().copy_(all.lse)};
}

detail::TreeAttentionGradients tree_attention_backward(const SequenceAttention& attention,
                                                       const detail::TreeAttentionArguments& arguments,
                                                       const at::Tensor& grad_out_in,
                                                       const at::Tensor& out_in, const at::Tensor& lse) {
  const AttentionCalls calls(attention, arguments);
  const at::Tensor grad_out = calls.given(grad_out_in), out = calls.given(out_in);
  const auto sums = calls.q.options().dtype(detail::accumulator_dtype(calls.dtype));
  const at::Tensor grad_q = at::zeros(calls.q.sizes(), sums);
  const at::Tensor grad_k = at::zeros(calls.keys.k.sizes(), sums);
  const at::Tensor grad_v = at::zeros(calls.keys.v.sizes(), sums);
  calls.for_each_call([&](const SequenceInputs& inputs, const PackedSequences& sequences,
                          const Selection& rows, const Selection& columns) {
    const AttentionResult global{rows.of(out), rows.of(lse, 1).contiguous()};
    const SequenceGradients part = attention.backward(rows.of(grad_out), inputs, global, sequences);
    rows.add(grad_q, part.q);
    columns.add(grad_k, part.k);
    columns.add(grad_v, part.v);
  });
  return detail::split_gradients(arguments, grad_q, grad_k, grad_v);
}

}  // namespace espalier::varlen
