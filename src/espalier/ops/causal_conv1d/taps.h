// SPDX-License-Identifier: Apache-2.0
// Which rows a causal convolution reads, as plain lists of indices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier::detail {

/// Rows are numbered as if a row of zeros, the N tails of W - 1 rows each and the T tokens stood one after
/// another.
class ConvolutionRows {
 public:
  ConvolutionRows(std::span<const int32_t> prev, int64_t num_tails, int64_t taps)
      : prev_(prev), history_(taps - 1), first_token_(1 + num_tails * (taps - 1)) {}

  int64_t of_token(int64_t token) const { return first_token_ + token; }

  /// The row before on the path; that of zeros before its beginning.
  int64_t before(int64_t row) const;

 private:
  std::span<const int32_t> prev_;
  int64_t history_, first_token_;
};

/// A list in which every stretch of tokens that follow each other stands behind the W - 1 rows before it. So
/// tap j of all tokens is the list moved by j rows.
struct ConvolutionList {
  std::vector<int64_t> row;                         // [B], as in ConvolutionRows
  std::vector<int64_t> own;                         // [T]: where in the list each token stands
  std::vector<int64_t> history_place, history_row;  // [M]: rows before a stretch that are not zeros
};
ConvolutionList convolution_list(std::span<const int32_t> prev, int64_t num_tails, int64_t taps);

/// [E * (W - 1)]: the rows up to each of `ends`, oldest first.
std::vector<int64_t> tail_rows(std::span<const int32_t> prev, int64_t num_tails, int64_t taps,
                               std::span<const int64_t> ends);

}  // namespace espalier::detail
