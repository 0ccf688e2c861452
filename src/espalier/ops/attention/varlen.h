// SPDX-License-Identifier: Apache-2.0
// tree_attention by the dense blocks of the mask (mask_blocks.h), through any attention to sequences: ATen's
// flash attention on CUDA. The CPU's serves as the baseline of the benchmark.
#pragma once

#include "espalier/ops/attention/arguments.h"

namespace espalier::varlen {

/// Sequences laid end to end: rows [row_offsets[s], row_offsets[s + 1]) attend to columns [column_offsets[s],
/// column_offsets[s + 1]), to all of them or, where causal (there are then as many columns as rows), to those
/// up to themselves. No sequence is without rows or without columns.
struct PackedSequences {
  at::Tensor row_offsets, column_offsets;  // int32, contiguous, on the device of what they describe
  int64_t longest_rows, longest_columns;
  bool causal;

  int64_t size() const { return row_offsets.size(0) - 1; }
};

/// What sequences are made of, contiguous: q [rows, H, D], k and v [columns, K, D].
struct SequenceInputs {
  at::Tensor q, k, v;
  double softmax_scale;
};

/// out [rows, H, D] and lse [H, rows], contiguous; lse in the dtype of sums.
struct AttentionResult {
  at::Tensor out, lse;
};

struct SequenceGradients {
  at::Tensor q, k, v;
};

/// Attention of sequences, each by itself.
class SequenceAttention {
 public:
  virtual ~SequenceAttention() = default;

  /// The dtype that inputs of `dtype` are given in.
  virtual at::ScalarType dtype(at::ScalarType dtype) const = 0;
  /// The most sequences of one call.
  virtual int64_t max_sequences(int64_t num_heads, int64_t head_dim) const = 0;

  virtual AttentionResult forward(const SequenceInputs& inputs, const PackedSequences& sequences) const = 0;
  /// The sequences' share of the gradients, where `global` is the result of the rows over all their columns,
  /// in this call and in others: with P = exp(S - lse) and delta = rowsum(grad_out * out) of `global`.
  virtual SequenceGradients backward(const at::Tensor& grad_out, const SequenceInputs& inputs,
                                     const AttentionResult& global,
                                     const PackedSequences& sequences) const = 0;
};

/// ATen's flash attention on the CPU, sequence by sequence: float64, and float32 for everything else.
const SequenceAttention& flash_cpu();

/// ATen's flash attention on CUDA: bfloat16 and float16, head dimensions up to 256, compute capability 8.0 or
/// higher. Backward is deterministic if at::globalContext().deterministicAlgorithms() (in Python,
/// torch.use_deterministic_algorithms(True)): otherwise it adds to dQ in an order of its own.
const SequenceAttention& flash_cuda();

/// espalier::tree_attention and espalier::tree_attention_backward (tree_attention.h) on the device of the
/// arguments; not differentiable. The host waits for a copy of subtree_end in each. Throws InputError where
/// subtree_end or the context's blocks are not as said, and c10::Error where there is a sliding window: it
/// leaves no dense blocks.
detail::TreeAttentionResults tree_attention(const SequenceAttention& attention,
                                            const detail::TreeAttentionArguments& arguments);

detail::TreeAttentionGradients tree_attention_backward(const SequenceAttention& attention,
                                                       const detail::TreeAttentionArguments& arguments,
                                                       const at::Tensor& grad_out, const at::Tensor& out,
                                                       const at::Tensor& lse);

}  // namespace espalier::varlen
