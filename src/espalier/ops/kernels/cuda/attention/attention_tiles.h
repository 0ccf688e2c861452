// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements in shared memory and the fragments of mma.m16n8k16 in registers.
//
// A tile is [rows, kColumns], kColumns a multiple of 64, in 16-byte chunks; chunk c of row r is stored at
// index c ^ (r % 8) of its row, so that eight rows of a chunk (an ldmatrix matrix) cover all 32 banks.
// Fragments: lane l holds rows l / 4 and l / 4 + 8 of a 16 x 8 result, columns 2 (l % 4) + {0, 1}.
#pragma once

#include "espalier/ops/kernels/cuda/attention/tile_schedule.h"
#include "espalier/ops/kernels/cuda/attention/tree_attention.h"
#include "espalier/ops/kernels/cuda/simt.h"

namespace espalier::cuda {

constexpr int kChunk = 8;  // elements of 16 bytes

template <int kColumns>
ESPALIER_SHARED_CODE int tile_offset(int row, int chunk) {
  static_assert(kColumns % 64 == 0);
  return row * kColumns + ((chunk ^ (row & 7)) * kChunk);
}

/// The ldmatrix address of this lane for rows from `row` (a multiple of 8) and chunks from `chunk`; at() adds
/// an offset. The four matrices are rows 0-7 and 8-15 of one chunk, then of the next (kRowsFirst); or one
/// chunk and the next of rows 0-7, then of rows 8-15.
enum class MatrixOrder { kRowsFirst, kChunksFirst };

template <int kColumns, MatrixOrder kOrder>
class MatrixPointer {
 public:
  ESPALIER_KERNEL explicit MatrixPointer(int row, int chunk = 0) {
    const int lane = simt::lane();
    const bool rows_first = kOrder == MatrixOrder::kRowsFirst;
    row += lane % 8 + (rows_first ? lane / 8 % 2 : lane / 16) * 8;
    offset_ = tile_offset<kColumns>(row, chunk + (rows_first ? lane / 16 : lane / 8 % 2));
  }
  /// `rows`: a multiple of 8. `chunks`: even and with no bit in common with the first chunk, so that XOR adds
  /// it.
  ESPALIER_KERNEL int at(int rows, int chunks) const {
    return (offset_ ^ (chunks % 8 * kChunk)) + rows * kColumns + chunks / 8 * 64;
  }

 private:
  int offset_;
};

/// A warp's part of a product: kRowTiles x 16 rows, kColumnTiles x 8 columns.
template <int kRowTiles, int kColumnTiles>
struct Accumulators {
  float at[kRowTiles][kColumnTiles][4];

  ESPALIER_KERNEL void clear() {
    ESPALIER_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      ESPALIER_UNROLL
      for (int n = 0; n < kColumnTiles; ++n) {
        ESPALIER_UNROLL
        for (int i = 0; i < 4; ++i) at[m][n][i] = 0;
      }
    }
  }

  /// Rows 16 m + {0, ..., 15} and columns 16 step + {0, ..., 15}, rounded, as the left operand of a product.
  template <class Element>
  ESPALIER_KERNEL void round(uint32_t (&a)[4], int m, int step) const {
    ESPALIER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float (&d)[4] = at[m][2 * step + i / 2];
      a[i] = simt::pack<Element>(d[i % 2 * 2], d[i % 2 * 2 + 1]);
    }
  }

  /// Stores the result times `factor`, rounded, into a tile at `row` and `chunk`.
  template <int kTileColumns, class Element>
  ESPALIER_KERNEL void store(Element* tile, int row, int chunk, float factor) const {
    ESPALIER_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      ESPALIER_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int r = row + 16 * m + 8 * half + simt::lane() / 4;
        ESPALIER_UNROLL
        for (int n = 0; n < kColumnTiles; ++n) {
          Element* to = tile + tile_offset<kTileColumns>(r, chunk + n) + simt::lane() % 4 * 2;
          *reinterpret_cast<uint32_t*>(to) =
              simt::pack<Element>(at[m][n][2 * half] * factor, at[m][n][2 * half + 1] * factor);
        }
      }
    }
  }
};

/// D += A B^T over all columns of two tiles, A from row `row_a`, B from row `row_b`.
template <int kColumns, class Element, int kRowTiles, int kColumnTiles>
ESPALIER_KERNEL void multiply_rows(Accumulators<kRowTiles, kColumnTiles>& d, const Element* a, int row_a,
                                   const Element* b, int row_b) {
  const MatrixPointer<kColumns, MatrixOrder::kRowsFirst> pointer_a(row_a);
  const MatrixPointer<kColumns, MatrixOrder::kChunksFirst> pointer_b(row_b);
  ESPALIER_UNROLL
  for (int step = 0; step < kColumns / 16; ++step) {
    uint32_t left[kRowTiles][4];
    ESPALIER_UNROLL
    for (int m = 0; m < kRowTiles; ++m) simt::load_matrices(left[m], a + pointer_a.at(16 * m, 2 * step));
    ESPALIER_UNROLL
    for (int n = 0; n < kColumnTiles; n += 2) {
      uint32_t right[4];
      simt::load_matrices(right, b + pointer_b.at(8 * n, 2 * step));
      ESPALIER_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        simt::multiply_add<Element>(d.at[m][n], left[m], {right[0], right[1]});
        simt::multiply_add<Element>(d.at[m][n + 1], left[m], {right[2], right[3]});
      }
    }
  }
}

/// D += A B for 16 kSteps rows of tile B, from its column chunk `chunk`; load_left(a, m, step) gives A.
template <int kSteps, int kColumns, class Element, int kRowTiles, int kColumnTiles, class LoadLeft>
ESPALIER_KERNEL void multiply_columns(Accumulators<kRowTiles, kColumnTiles>& d, const LoadLeft& load_left,
                                      const Element* b, int chunk) {
  const MatrixPointer<kColumns, MatrixOrder::kRowsFirst> pointer(0, chunk);
  ESPALIER_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    uint32_t left[kRowTiles][4];
    ESPALIER_UNROLL
    for (int m = 0; m < kRowTiles; ++m) load_left(left[m], m, step);
    ESPALIER_UNROLL
    for (int n = 0; n < kColumnTiles; n += 2) {
      uint32_t right[4];
      simt::load_matrices_transposed(right, b + pointer.at(16 * step, n));
      ESPALIER_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        simt::multiply_add<Element>(d.at[m][n], left[m], {right[0], right[1]});
        simt::multiply_add<Element>(d.at[m][n + 1], left[m], {right[2], right[3]});
      }
    }
  }
}

/// Copies kRows rows to shared memory by all kThreads threads of a block. `source(row)`: address of a row,
/// read only if valid(row); others are zero-filled.
template <int kRows, int kColumns, int kThreads, class Element, class Source, class Valid>
ESPALIER_KERNEL void copy_rows(Element* tile, const Source& source, const Valid& valid) {
  constexpr int kRowChunks = kColumns / kChunk, kRowsAtOnce = kThreads / kRowChunks;
  static_assert(kThreads % kRowChunks == 0 && kRows % kRowsAtOnce == 0);
  const int chunk = simt::thread() % kRowChunks, first = simt::thread() / kRowChunks;
  ESPALIER_UNROLL
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int row = first + i * kRowsAtOnce;
    simt::copy_async(tile + tile_offset<kColumns>(row, chunk), source(row) + chunk * kChunk, valid(row));
  }
}

/// Rows of a tile are (token, query head) pairs: `packed` heads of one key head, token by token. A loaded key
/// or value serves the same number of rows as with a single head, but a tile covers fewer tokens: with short
/// nodes fewer pairs are masked (about (tokens + keys) / 2 keys per query on a causal diagonal), and
/// gradients of keys are summed over heads in registers.
struct RowPacking {
  int32_t packed;      // divides the group
  int32_t parts;       // of a group: group / packed
  int32_t reciprocal;  // 2^16 / packed + 1

  static constexpr int kMost = 8;
  /// Block sizes are rows / packed tokens: at most one row in 40 is unused.
  static RowPacking of(int group, int64_t most = kMost) {
    int packed = 1;
    for (int n = 2; n <= kMost && n <= most; ++n) {
      if (group % n == 0) packed = n;
    }
    return {packed, group / packed, (1 << 16) / packed + 1};
  }
  ESPALIER_SHARED_CODE int token(int row) const { return (row * reciprocal) >> 16; }
  ESPALIER_SHARED_CODE int head(int row) const { return row - token(row) * packed; }
};

/// Loads keys or values of a block for one head; remaining rows of the tile are zero-filled.
template <int kRows, int kColumns, int kThreads, class Element>
ESPALIER_KERNEL void copy_keys(Element* tile, const TokenHeadsData& source, int head, const KeyBlock& block) {
  constexpr int kRowChunks = kColumns / kChunk, kRowsAtOnce = kThreads / kRowChunks;
  static_assert(kThreads % kRowChunks == 0 && kRows % kRowsAtOnce == 0);
  const int chunk = simt::thread() % kRowChunks, first = simt::thread() / kRowChunks;
  const int keys = block.num_keys();
  // Incremental byte offsets: two additions per row.
  const int64_t step = kRowsAtOnce * source.token_stride * int64_t{sizeof(Element)};
  const auto* from = reinterpret_cast<const std::byte*>(static_cast<const Element*>(source.data) +
                                                        (block.begin + first) * source.token_stride +
                                                        head * source.head_stride + chunk * kChunk);
  ESPALIER_UNROLL
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    simt::copy_async(tile + tile_offset<kColumns>(first + row, chunk), from, first + row < keys);
    from += step;
  }
}

/// The mask of tiles that are not full or have fewer keys than a tile. Key `column` is visible to query j iff
/// column <= newest(j) and j < end(column).
struct KeyMask {
  bool needed;
  bool forest;
  int32_t begin;  // begin of the block, or of the queries that see a context block

  ESPALIER_SHARED_CODE KeyMask(const KeyBlock& block, int32_t query_begin, int32_t query_end, int keys)
      : needed(block.num_keys() < keys || classify(block, query_begin, query_end) != TileClass::kFull),
        forest(block.segment < 0),
        begin(forest ? block.begin : block.query_begin) {}

  ESPALIER_SHARED_CODE int32_t newest(int32_t query) const {
    if (forest) return query - begin;
    return query >= begin ? 1 << 20 : -1;
  }
  static ESPALIER_KERNEL int32_t end(const KeyBlock& block, const int32_t* subtree_end, int column) {
    if (column >= block.num_keys()) return 0;
    return block.segment < 0 ? subtree_end[block.begin + column] : block.query_end;
  }
};

/// Sets masked scores to -infinity. Rows are queries from `row` of a tile with these `tokens`; columns are
/// the keys of a block, with their `ends` (KeyMask::end).
template <int kRowTiles, int kColumnTiles>
ESPALIER_KERNEL void hide_pairs(Accumulators<kRowTiles, kColumnTiles>& scores, const KeyMask& mask,
                                const int32_t* tokens, int row, const int32_t* ends) {
  int32_t query[kRowTiles][2], newest[kRowTiles][2];
  ESPALIER_UNROLL
  for (int m = 0; m < kRowTiles; ++m) {
    ESPALIER_UNROLL
    for (int half = 0; half < 2; ++half) {
      query[m][half] = tokens[row + 16 * m + 8 * half + simt::lane() / 4];
      newest[m][half] = mask.newest(query[m][half]) - simt::lane() % 4 * 2;
    }
  }
  ESPALIER_UNROLL
  for (int n = 0; n < kColumnTiles; ++n) {
    ESPALIER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int32_t end = ends[8 * n + simt::lane() % 4 * 2 + i];
      ESPALIER_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        ESPALIER_UNROLL
        for (int half = 0; half < 2; ++half) {
          const bool seen = 8 * n + i <= newest[m][half] && query[m][half] < end;
          if (!seen) scores.at[m][n][2 * half + i] = -INFINITY;
        }
      }
    }
  }
}

/// Copies a warp's rows of a tile, from `row`, to target(row), 16 bytes at a time, if valid(row).
template <int kRows, int kColumns, class Element, class Target, class Valid>
ESPALIER_KERNEL void store_rows(const Element* tile, int row, const Target& target, const Valid& valid) {
  constexpr int kRowChunks = kColumns / kChunk, kRowsAtOnce = simt::kWarpSize / kRowChunks;
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int r = row + i * kRowsAtOnce + simt::lane() / kRowChunks, chunk = simt::lane() % kRowChunks;
    if (!valid(r)) continue;
    *reinterpret_cast<simt::Vector16*>(target(r) + chunk * kChunk) =
        *reinterpret_cast<const simt::Vector16*>(tile + tile_offset<kColumns>(r, chunk));
  }
}

/// Block sizes in tokens and keys of a tile shape.
template <class Tiles>
BlockSizes block_sizes(const RowPacking& packing) {
  return {Tiles::kRows / packing.packed, Tiles::kKeys};
}

/// The launch grid.
struct AttentionGrid {
  int32_t x;
  int32_t y;
  int32_t z;
};

constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

}  // namespace espalier::cuda
