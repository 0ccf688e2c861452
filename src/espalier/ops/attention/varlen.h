// SPDX-License-Identifier: Apache-2.0
// tree_attention by the dense blocks of the mask (mask_blocks.h), through variable-length attention: ATen's
// flash attention on CUDA, or on the CPU as a baseline for benchmarks.
#pragma once

#include "espalier/ops/attention/arguments.h"

namespace espalier::varlen {

/// Packed sequences: rows [row_offsets[s], row_offsets[s + 1]) attend to columns [column_offsets[s],
/// column_offsets[s + 1]), to all of them or, if causal (with as many columns as rows), up to themselves. No
/// sequence has empty rows or columns.
struct PackedSequences {
  at::Tensor row_offsets, column_offsets;  // int32, contiguous, on the device of the inputs
  int64_t longest_rows, longest_columns;
  bool causal;

  int64_t size() const { return row_offsets.size(0) - 1; }
};

/// Inputs, contiguous: q [rows, H, D], k and v [columns, K, D].
struct SequenceInputs {
  at::Tensor q, k, v;
  double softmax_scale;
};

/// out [rows, H, D] and lse [H, rows], contiguous; lse in the accumulator dtype.
struct AttentionResult {
  at::Tensor out, lse;
};

struct SequenceGradients {
  at::Tensor q, k, v;
};

/// Attention within packed sequences.
class SequenceAttention {
 public:
  virtual ~SequenceAttention() = default;

  /// The dtype to convert inputs of `dtype` to.
  virtual at::ScalarType dtype(at::ScalarType dtype) const = 0;
  /// Maximum number of sequences per call.
  virtual int64_t max_sequences(int64_t num_heads, int64_t head_dim) const = 0;

  virtual AttentionResult forward(const SequenceInputs& inputs, const PackedSequences& sequences) const = 0;
  /// The sequences' contribution to the gradients. `global`: the merged result of the rows over the columns
  /// of all calls; with P = exp(S - lse) and delta = rowsum(grad_out * out) of `global`.
  virtual SequenceGradients backward(const at::Tensor& grad_out, const SequenceInputs& inputs,
                                     const AttentionResult& global,
                                     const PackedSequences& sequences) const = 0;
};

/// ATen's flash attention on the CPU, one sequence at a time, in float64 for float64, otherwise float32.
const SequenceAttention& flash_cpu();

/// ATen's flash attention on CUDA: bfloat16 and float16, head dimensions up to 256, compute capability 8.0 or
/// higher. Backward is deterministic if at::globalContext().deterministicAlgorithms() (in Python,
/// torch.use_deterministic_algorithms(True)): otherwise it accumulates dQ by atomics.
const SequenceAttention& flash_cuda();

/// espalier::tree_attention and espalier::tree_attention_backward (tree_attention.h) on the device of the
/// arguments; not differentiable. Each call synchronises to copy subtree_end to the host. Throws InputError
/// on invalid subtree_end or context blocks, and c10::Error for a sliding window, whose mask has no dense
/// blocks.
detail::TreeAttentionResults tree_attention(const SequenceAttention& attention,
                                            const detail::TreeAttentionArguments& arguments);

detail::TreeAttentionGradients tree_attention_backward(const SequenceAttention& attention,
                                                       const detail::TreeAttentionArguments& arguments,
                                                       const at::Tensor& grad_out, const at::Tensor& out,
                                                       const at::Tensor& lse);

}  // namespace espalier::varlen
