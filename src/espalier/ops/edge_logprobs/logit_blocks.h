// SPDX-License-Identifier: Apache-2.0
// Partition of the matrix of logits in edge_logprobs. Does not use LibTorch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace espalier {

/// A range of rows and columns (vocabulary entries) of the matrix of logits.
struct LogitRange {
  int64_t row_begin;
  int64_t row_end;
  int64_t column_begin;
  int64_t column_end;
};

/// Rows and columns of one block; the last ones may be smaller.
struct LogitBlock {
  int64_t num_rows;
  int64_t num_columns;
};

/// The tile of one thread: large enough for full speed, and fits the L2 cache.
constexpr LogitBlock kLogitTile{512, 512};

/// Maximum memory of a block of logit gradients.
constexpr int64_t kLogitBlockBytes = int64_t{16} << 20;

/// Blocks extend over rows first: the gradient of the LM head is large, and a tall block reads and writes
/// each of its rows once for many tokens. num_rows * num_columns * bytes_per_logit is at most
/// kLogitBlockBytes; both sizes are at least 1. Blocks consist of whole tiles.
inline LogitBlock logit_block(int64_t num_rows, int64_t vocabulary, int64_t bytes_per_logit) {
  constexpr int64_t kMaxRows = 2048;
  static_assert(kMaxRows % kLogitTile.num_rows == 0);
  const int64_t rows = std::clamp<int64_t>(num_rows, 1, kMaxRows);
  const int64_t columns =
      kLogitBlockBytes / (rows * bytes_per_logit) / kLogitTile.num_columns * kLogitTile.num_columns;
  return {rows, std::clamp<int64_t>(columns, 1, std::max<int64_t>(vocabulary, 1))};
}

/// Maximum memory of a block of logits on a GPU.
constexpr int64_t kDeviceLogitBlockBytes = int64_t{512} << 20;

/// Blocks on a GPU. The gradient of the head is read and written once per block of rows, that of hidden once
/// per block of columns, compared to 2 rows columns C FLOPs of a product. 4,096 rows hide this (8 bytes per 2
/// * 4,096 FLOPs), as do the remaining 32,768 columns. Parts have about equal sizes. num_rows * num_columns *
/// bytes_per_logit is at most kDeviceLogitBlockBytes, also with rows padded to a multiple of 64 columns; both
/// sizes are at least 1.
inline LogitBlock device_logit_block(int64_t num_rows, int64_t vocabulary, int64_t bytes_per_logit) {
  constexpr int64_t kMaxRows = 4096, kStep = 256;
  const auto even_part = [](int64_t whole, int64_t most) {
    const int64_t parts = (whole + most - 1) / most, part = (whole + parts - 1) / parts;
    return parts == 1 ? whole : std::min((part + kStep - 1) / kStep * kStep, most);
  };
  const int64_t rows = even_part(std::max<int64_t>(num_rows, 1), kMaxRows);
  const int64_t most = kDeviceLogitBlockBytes / (rows * bytes_per_logit) / kStep * kStep;
  return {rows, even_part(std::max<int64_t>(vocabulary, 1), most)};
}

/// Calls visit(part) for all parts of `whole` of this size; rows in the inner loop.
template <class Visit>
void for_each_part(const LogitRange& whole, const LogitBlock& size, const Visit& visit) {
  for (int64_t column = whole.column_begin; column < whole.column_end; column += size.num_columns) {
    for (int64_t row = whole.row_begin; row < whole.row_end; row += size.num_rows) {
      visit(LogitRange{row, std::min(row + size.num_rows, whole.row_end), column,
                       std::min(column + size.num_columns, whole.column_end)});
    }
  }
}

}  // namespace espalier
