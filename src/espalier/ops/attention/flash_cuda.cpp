// SPDX-License-Identifier: Apache-2.0
// Attention of sequences by ATen's flash attention on CUDA
// (aten/src/ATen/native/transformers/cuda/flash_attn), called through the dispatcher, so CUDA is neither
// included nor linked.
#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/ops/attention/varlen.h"

namespace espalier::varlen {
namespace {

// The kernels load 16 bytes at a time: head dimensions and row offsets must be multiples of 8.
constexpr int64_t kAlignedElements = 8;
constexpr uintptr_t kAlignedBytes = 16;

// Backward pads its float32 buffer of dQ by this many rows per sequence.
constexpr int64_t kPaddingRows = 128;
constexpr int64_t kPaddingBytes = int64_t{1} << 30;
constexpr int64_t kMostSequences = 65535;  // limit of a grid dimension

int64_t round_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

at::Tensor aligned(const at::Tensor& tensor) {
  const int64_t head_dim = tensor.size(-1);
  const int64_t padding = round_up(head_dim, kAlignedElements) - head_dim;
  if (padding > 0)
    return at::constant_pad_nd(tensor, {0, padding});  // zeros do not affect scores or gradients
  const bool misaligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignedBytes != 0;
  return misaligned ? tensor.clone() : tensor;
}

at::Tensor without_padding(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.slice(-1, 0, like.size(-1)).contiguous();
}

// At least 2: for max_seqlen 1 the forward pass has a special case for grouped heads, which is avoided here.
// Larger values than the true maximum are allowed.
int64_t longest_rows(const PackedSequences& sequences) {
  return std::max<int64_t>(2, sequences.longest_rows);
}

class FlashCuda final : public SequenceAttention {
 public:
  at::ScalarType dtype(at::ScalarType dtype) const override { return dtype; }
  int64_t max_sequences(int64_t num_heads, int64_t head_dim) const override {
    const int64_t bytes_per_sequence = kPaddingRows * num_heads * round_up(head_dim, 64) * 4;
    return std::clamp<int64_t>(kPaddingBytes / bytes_per_sequence, 1, kMostSequences);
  }

  AttentionResult forward(const SequenceInputs& inputs, const PackedSequences& sequences) const override {
    const auto results = at::_flash_attention_forward(
        aligned(inputs.q), aligned(inputs.k), aligned(inputs.v), sequences.row_offsets,
        sequences.column_offsets, longest_rows(sequences), sequences.longest_columns, /*dropout_p=*/0.0,
        sequences.causal, /*return_debug_mask=*/false, inputs.softmax_scale);
    return {without_padding(std::get<0>(results), inputs.q), std::get<1>(results)};
  }

  SequenceGradients backward(const at::Tensor& grad_out, const SequenceInputs& inputs,
                             const AttentionResult& global, const PackedSequences& sequences) const override {
    // RNG state of dropout, which is unused.
    const auto state = inputs.q.options().dtype(at::kUInt64);
    const auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward(
        aligned(grad_out), aligned(inputs.q), aligned(inputs.k), aligned(inputs.v), aligned(global.out),
        global.lse, sequences.row_offsets, sequences.column_offsets, longest_rows(sequences),
        sequences.longest_columns, /*dropout_p=*/0.0, sequences.causal, at::empty({2}, state),
        at::empty({}, state), inputs.softmax_scale);
    return {without_padding(grad_q, inputs.q), without_padding(grad_k, inputs.k),
            without_padding(grad_v, inputs.v)};
  }
};

}  // namespace

const SequenceAttention& flash_cuda() {
  static const FlashCuda attention;
  return attention;
}

}  // namespace espalier::varlen
