// How edge_logprobs cuts the matrix of logits into blocks. Free of LibTorch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace espalier {

/// A block of logits may take this much memory.
constexpr int64_t kLogitBlockBytes = int64_t{32} << 20;

/// Rows and columns (vocabulary entries) of one block of logits; the last ones may be smaller.
struct LogitBlock {
  int64_t num_rows;
  int64_t num_columns;
};

/// Blocks are tall first: the LM head is larger than the hidden states, and a tall block reads (and, in
/// backward, writes) each of its rows once for many tokens. num_rows * num_columns * bytes_per_logit is at
/// most kLogitBlockBytes; both sizes are at least 1, whatever is given.
inline LogitBlock logit_block(int64_t num_rows, int64_t vocabulary, int64_t bytes_per_logit) {
  constexpr int64_t kMaxRows = 2048;
  const int64_t rows = std::clamp<int64_t>(num_rows, 1, kMaxRows);
  const int64_t columns = kLogitBlockBytes / (rows * bytes_per_logit);
  return {rows, std::clamp<int64_t>(columns, 1, std::max<int64_t>(vocabulary, 1))};
}

}  // namespace espalier
