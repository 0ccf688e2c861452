// SPDX-License-Identifier: Apache-2.0
// Shared by chunked linear recurrences on forests: rows of tokens as batched matrices, decays inside chunks,
// and the scan of states over the tree of chunks. docs/math.md, "Linear recurrences on trees".
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "espalier/ops/chunk_scan/chunk_tree.h"

namespace espalier::detail {

at::Tensor transposed(const at::Tensor& x);                     // [B, M, N] to [B, N, M]
at::Tensor row_dots(const at::Tensor& a, const at::Tensor& b);  // sum of a b over the last dimension

/// The chunks of one bucket: n chunks padded to L tokens.
struct BucketRows {
  const ChunkBucket* bucket = nullptr;
  at::Tensor token;  // [n * L]

  /// Rows x [T, H, D] as [n * H, L, D], copied.
  at::Tensor by_head(const at::Tensor& x) const;

  /// The same for x [T, H], as [n * H, L].
  at::Tensor numbers_by_head(const at::Tensor& x) const { return by_head(x.unsqueeze(-1)).squeeze(-1); }

  /// The adjoint of by_head on padded rows, [n * L, H, D].
  at::Tensor by_token(const at::Tensor& x) const;
  at::Tensor numbers_by_token(const at::Tensor& x) const { return by_token(x.unsqueeze(-1)).squeeze(-1); }

  /// [n * heads, L] of `dtype`: 1 for tokens, 0 for padding.
  at::Tensor is_token(int64_t heads, at::ScalarType dtype) const;

  /// The part of x [n * anything, ...] that belongs to the chunks of one level.
  at::Tensor at_level(const at::Tensor& x, int64_t level) const;
};

/// Products of decays inside chunks, from their logarithms g [B, L] (0 for padding).
struct ChunkDecays {
  at::Tensor before;   // [B, L]: product over tokens up to this one
  at::Tensor after;    // [B, L]: product over tokens after this one
  at::Tensor whole;    // [B]
  at::Tensor between;  // [B, L, L]: product over tokens after the column up to the row; 0 above the diagonal

  explicit ChunkDecays(const at::Tensor& g);
};

/// Gradients with respect to the logarithms of the members of ChunkDecays, in the same shapes.
struct ChunkDecayGradients {
  const at::Tensor &before, &after, &whole, &between;
};

/// The gradient of g [B, L].
at::Tensor chunk_decays_backward(const ChunkDecayGradients& log_gradients);

/// The arguments of a scan other than rows and states.
struct ScanPaths {
  const at::Tensor& prev;  // paths.h
  const at::Tensor& ends;  // [E] int64 on the CPU
  int64_t num_contexts;
  int64_t chunk_size;
};

/// Extracts them from the arguments of gated_delta_rule or ssm_scan.
template <class Arguments>
ScanPaths scan_paths(const Arguments& given) {
  return {given.prev, given.ends, given.states.defined() ? given.states.size(0) : 0, given.chunk_size};
}

/// Throws with prefix `op` unless chunk_size is a power of two.
void check_chunk_size(const char* op, int64_t chunk_size);

/// A forest in chunks, with its indices on a device.
class ChunkScan {
 public:
  /// Throws with prefix `op` on invalid prev, ends or chunk_size.
  ChunkScan(const char* op, const at::Tensor& rows, const ScanPaths& paths);

  ChunkScan(const ChunkScan&) = delete;  // buckets refer to the tree
  ChunkScan& operator=(const ChunkScan&) = delete;

  const std::vector<BucketRows>& buckets() const { return buckets_; }

  /// Rows of all buckets, [n * L, ...] each, reordered to token order.
  at::Tensor in_token_order(const std::vector<at::Tensor>& rows) const;

  /// Maps the initial states [n, ...] of the chunks of one bucket and level to their final states, or
  /// gradients of the latter to those of the former.
  using Step = std::function<at::Tensor(size_t bucket, int64_t level, const at::Tensor& states)>;

  /// Runs over the levels from `first` [1 + N, ...], the state at the start of paths and those of contexts.
  /// Returns the states at the ends [E, ...].
  at::Tensor run(const at::Tensor& first, const Step& step) const;

  /// The backward pass of run(). `grad_ends` [E, ...]: gradients of its result, or undefined. Returns the
  /// gradient of `first`. A state's gradient is the sum over the chunks that start from it.
  at::Tensor run_back(const at::Tensor& first, const at::Tensor& grad_ends, const Step& step) const;

 private:
  template <class Work>
  void over_buckets(int64_t level, const Work& work) const;

  ChunkTree tree_;
  std::vector<BucketRows> buckets_;
  at::Tensor place_, source_, end_, end_number_;  // ChunkTree's lists
};

/// [1 + N, heads, rows, columns]: zeros, then the states of contexts, if any.
at::Tensor first_states(const at::Tensor& contexts, at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace espalier::detail
