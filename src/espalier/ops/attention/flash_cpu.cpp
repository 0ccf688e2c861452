// SPDX-License-Identifier: Apache-2.0
// Packed sequence attention by ATen's flash attention on the CPU.
// bfloat16 is computed in float32 and rounded once: ATen's float32 kernels are faster on CPUs without AMX
// (backward on all CPUs), and partial results are not rounded.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <limits>

#include "espalier/ops/attention/varlen.h"
#include "espalier/ops/checks.h"

namespace espalier::varlen {
namespace {

// Sequences with more (query, key) pairs than this use all threads; smaller ones use one thread each.
constexpr int64_t kLargeSequence = 128 * 128;

struct Sequence {
  int64_t row_begin, row_end, column_begin, column_end;

  // [rows, H, D] -> [1, H, the sequence's rows, D], a view.
  at::Tensor rows(const at::Tensor& tensor) const {
    return tensor.slice(0, row_begin, row_end).transpose(0, 1).unsqueeze(0);
  }
  at::Tensor columns(const at::Tensor& tensor) const {
    return tensor.slice(0, column_begin, column_end).transpose(0, 1).unsqueeze(0);
  }
  // [H, rows] -> [1, H, the sequence's rows], a view.
  at::Tensor lse(const at::Tensor& tensor) const { return tensor.slice(1, row_begin, row_end).unsqueeze(0); }
};

// Sequences are independent, so results do not depend on order or number of threads.
template <class Work>
void for_each_sequence(const PackedSequences& sequences, const Work& work) {
  const int32_t* rows = sequences.row_offsets.const_data_ptr<int32_t>();
  const int32_t* columns = sequences.column_offsets.const_data_ptr<int32_t>();
  std::vector<Sequence> small;
  for (int64_t s = 0; s < sequences.size(); ++s) {
    const Sequence sequence{rows[s], rows[s + 1], columns[s], columns[s + 1]};
    const int64_t pairs =
        (sequence.row_end - sequence.row_begin) * (sequence.column_end - sequence.column_begin);
    if (pairs > kLargeSequence) {
      work(sequence);
    } else {
      small.push_back(sequence);
    }
  }
  at::parallel_for(0, static_cast<int64_t>(small.size()), 4, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;  // thread-local, not inherited by other threads
    for (int64_t i = begin; i < end; ++i) work(small[i]);
  });
}

class FlashCpu final : public SequenceAttention {
 public:
  at::ScalarType dtype(at::ScalarType dtype) const override { return detail::accumulator_dtype(dtype); }
  int64_t max_sequences(int64_t, int64_t) const override { return std::numeric_limits<int32_t>::max(); }

  AttentionResult forward(const SequenceInputs& inputs, const PackedSequences& sequences) const override {
    const AttentionResult all{at::empty(inputs.q.sizes(), inputs.q.options()),
                              at::empty({inputs.q.size(1), inputs.q.size(0)}, inputs.q.options())};
    for_each_sequence(sequences, [&](const Sequence& sequence) {
      const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
          sequence.rows(inputs.q), sequence.columns(inputs.k), sequence.columns(inputs.v), 0.0,
          sequences.causal, {}, inputs.softmax_scale);
      sequence.rows(all.out).copy_(out);
      sequence.lse(all.lse).copy_(lse);
    });
    return all;
  }

  SequenceGradients backward(const at::Tensor& grad_out, const SequenceInputs& inputs,
                             const AttentionResult& global, const PackedSequences& sequences) const override {
    const auto like = [](const at::Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); };
    const SequenceGradients all{like(inputs.q), like(inputs.k), like(inputs.v)};
    for_each_sequence(sequences, [&](const Sequence& sequence) {
      const auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          sequence.rows(grad_out), sequence.rows(inputs.q), sequence.columns(inputs.k),
          sequence.columns(inputs.v), sequence.rows(global.out), sequence.lse(global.lse), 0.0,
          sequences.causal, {}, inputs.softmax_scale);
      sequence.rows(all.q).copy_(grad_q);
      sequence.columns(all.k).copy_(grad_k);
      sequence.columns(all.v).copy_(grad_v);
    });
    return all;
  }
};

}  // namespace

const SequenceAttention& flash_cpu() {
  static const FlashCpu attention;
  return attention;
}

}  // namespace espalier::varlen
