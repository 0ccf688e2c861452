// SPDX-License-Identifier: Apache-2.0
// The rows that a causal convolution reads, as lists of indices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier::detail {

/// Numbers the rows of the concatenation of one zero row, N tails of W - 1 rows each, and T tokens.
class ConvolutionRows {
 public:
  ConvolutionRows(std::span<const int32_t> prev, int64_t num_tails, int64_t taps)
      : prev_(prev), history_(taps - 1), first_token_(1 + num_tails * (taps - 1)) {}

  int64_t token_row(int64_t token) const { return first_token_ + token; }

  /// The previous row on the path; the zero row before its start.
  int64_t before(int64_t row) const;

 private:
  std::span<const int32_t> prev_;
  int64_t history_, first_token_;
};

/// A list of rows in which each contiguous range of tokens is preceded by the W - 1 rows before it, so that
/// tap j of all tokens is the list shifted by j rows.
struct ConvolutionList {
  std::vector<int64_t> row;                         // [B], numbered by ConvolutionRows
  std::vector<int64_t> own;                         // [T]: index of each token in the list
  std::vector<int64_t> history_place, history_row;  // [M]: history rows other than zeros
};
ConvolutionList convolution_list(std::span<const int32_t> prev, int64_t num_tails, int64_t taps);

/// [E * (W - 1)]: the rows up to each of `ends`, oldest first.
std::vector<int64_t> tail_rows(std::span<const int32_t> prev, int64_t num_tails, int64_t taps,
                               std::span<const int64_t> ends);

}  // namespace espalier::detail
