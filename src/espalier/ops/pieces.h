// The dense pieces of the attention mask of a forest in preorder. Free of LibTorch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

/// A dense block of the mask: queries [row_begin, row_end) attend to keys [column_begin, column_end), to all
/// of them or, in a causal piece (rows and columns are then the same tokens), to those up to themselves.
struct Piece {
  int64_t row_begin;
  int64_t row_end;
  int64_t column_begin;
  int64_t column_end;
  bool causal;

  int64_t num_rows() const { return row_end - row_begin; }
  int64_t num_columns() const { return column_end - column_begin; }
  bool operator==(const Piece&) const = default;
};

/// Splits {(j, i): i <= j < subtree_end[i]} (row j, column i) into disjoint pieces. A maximal stretch of
/// tokens with equal subtree_end is a chain: it gives one triangle, and one full rectangle of its
/// descendants' rows if it has any.
///   Level 0 holds the triangles, level d + 1 the rectangles of stretches below d other stretches, both in
/// preorder. Pieces of one level share neither rows nor columns; every row has exactly one triangle.
/// Takes time linear in tokens. Throws InputError where subtree_end is not that of a forest in preorder:
/// i < subtree_end[i] <= T, and subtree_end[j] <= subtree_end[i] for i <= j < subtree_end[i].
std::vector<std::vector<Piece>> pieces_by_level(std::span<const int32_t> subtree_end);

}  // namespace espalier
