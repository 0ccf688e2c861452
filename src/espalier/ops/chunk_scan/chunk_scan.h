// SPDX-License-Identifier: Apache-2.0
// What linear recurrences on forests have in common when they are computed chunk by chunk: rows of tokens as
// batches of matrices, decays inside chunks, and states that run through the tree of chunks. docs/math.md,
// "Linear recurrences on trees".
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "espalier/ops/chunk_scan/chunk_tree.h"

namespace espalier::detail {

at::Tensor transposed(const at::Tensor& x);                     // [B, M, N] to [B, N, M]
at::Tensor row_dots(const at::Tensor& a, const at::Tensor& b);  // sum of a b over the last dimension

/// The tokens of the chunks of one bucket, n chunks padded to L tokens.
struct BucketRows {
  const ChunkBucket* bucket = nullptr;
  at::Tensor token;  // [n * L]

  /// Rows x [T, H, D] as [n * H * repeat, L, D], each head `repeat` times.
  at::Tensor by_head(const at::Tensor& x, int64_t repeat = 1) const;

  /// The same of x [T, H], as [n * H, L].
  at::Tensor numbers_by_head(const at::Tensor& x) const { return by_head(x.unsqueeze(-1)).squeeze(-1); }

  /// The adjoint of by_head on padded rows, [n * L, H, D]: sums over what was repeated.
  at::Tensor by_token(const at::Tensor& x, int64_t repeat = 1) const;
  at::Tensor numbers_by_token(const at::Tensor& x) const { return by_token(x.unsqueeze(-1)).squeeze(-1); }

  /// [n * heads, L] of `dtype`: 1 for tokens, 0 for padding.
  at::Tensor is_token(int64_t heads, at::ScalarType dtype) const;

  /// What belongs to the chunks of one level of x [n * anything, ...].
  at::Tensor at_level(const at::Tensor& x, int64_t level) const;
};

/// Products of decays inside chunks, from their logarithms g [B, L] (0 for padding).
struct ChunkDecays {
  at::Tensor before;   // [B, L]: of all tokens up to this one
  at::Tensor after;    // [B, L]: of all tokens after this one
  at::Tensor whole;    // [B]
  at::Tensor between;  // [B, L, L]: of those after the column up to the row, 0 above the diagonal

  explicit ChunkDecays(const at::Tensor& g);
};

/// Gradients of the logarithms of ChunkDecays' members, of the shapes of those.
struct ChunkDecayGradients {
  const at::Tensor &before, &after, &whole, &between;
};

/// The gradient of g [B, L].
at::Tensor chunk_decays_backward(const ChunkDecayGradients& log_gradients);

/// The arguments of a scan that are neither rows nor states.
struct ScanPaths {
  const at::Tensor& prev;  // paths.h
  const at::Tensor& ends;  // [E] int64 on the CPU
  int64_t num_contexts;
  int64_t chunk_size;
};

/// Of the arguments of gated_delta_rule or ssm_scan.
template <class Arguments>
ScanPaths scan_paths(const Arguments& given) {
  return {given.prev, given.ends, given.states.defined() ? given.states.size(0) : 0, given.chunk_size};
}

/// Throws in the name of `op` unless chunk_size is a power of two.
void check_chunk_size(const char* op, int64_t chunk_size);

/// A forest in chunks on a device.
class ChunkScan {
 public:
  /// Throws in the name of `op` where prev, ends or chunk_size are not as said.
  ChunkScan(const char* op, const at::Tensor& rows, const ScanPaths& paths);

  ChunkScan(const ChunkScan&) = delete;  // buckets refer to the tree
  ChunkScan& operator=(const ChunkScan&) = delete;

  const std::vector<BucketRows>& buckets() const { return buckets_; }

  /// Rows of the buckets, [n * L, ...] each, in the order of tokens.
  at::Tensor in_token_order(const std::vector<at::Tensor>& rows) const;

  /// Of n chunks, those of one bucket on one level: from the states [n, ...] at which they begin to those at
  /// their ends, or from gradients of the latter to those of the former.
  using Step = std::function<at::Tensor(size_t bucket, int64_t level, const at::Tensor& states)>;

  /// Runs through the levels, from first [1 + N, ...]: the state at the beginning of paths and those of the
  /// contexts. The states at the ends [E, ...].
  at::Tensor run(const at::Tensor& first, const Step& step) const;

  /// Runs back from the last level. `grad_ends` [E, ...]: gradients of what run returned, or undefined. The
  /// gradient of `first`. Every state's gradient is the sum of what the chunks that begin at it send.
  at::Tensor run_back(const at::Tensor& first, const at::Tensor& grad_ends, const Step& step) const;

 private:
  template <class Work>
  void over_buckets(int64_t level, const Work& work) const;

  ChunkTree tree_;
  std::vector<BucketRows> buckets_;
  at::Tensor place_, source_, end_, end_number_;  // ChunkTree's lists
};

/// Of a recurrence, what is inside the chunks of each bucket.
template <class Inside, class Problem>
std::vector<Inside> over_buckets(const Problem& problem) {
  std::vector<Inside> inside;
  for (const BucketRows& rows : problem.scan.buckets()) inside.emplace_back(problem, rows);
  return inside;
}

/// [1 + N, heads, rows, columns]: zeros, then the states of contexts if there are any.
at::Tensor first_states(const at::Tensor& contexts, at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace espalier::detail
