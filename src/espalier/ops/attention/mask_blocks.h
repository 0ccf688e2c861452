// SPDX-License-Identifier: Apache-2.0
// The dense blocks of the attention mask of a forest in preorder. Does not use LibTorch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

/// A dense block of the mask: queries [row_begin, row_end) attend to keys [column_begin, column_end), to all
/// of them or, in a causal block (with equal row and column ranges), up to themselves.
struct MaskBlock {
  int64_t row_begin;
  int64_t row_end;
  int64_t column_begin;
  int64_t column_end;
  bool causal;
  int64_t segment = -1;  // context segment of the columns; -1: the tokens themselves

  int64_t num_rows() const { return row_end - row_begin; }
  int64_t num_columns() const { return column_end - column_begin; }
  bool operator==(const MaskBlock&) const = default;
};

/// Splits {(j, i): i <= j < subtree_end[i]} (row j, column i) into disjoint blocks. A maximal range of tokens
/// with equal subtree_end is a chain: it yields one triangle, and one full rectangle for the rows of its
/// descendants, if any.
///   Level 0 holds the triangles, level d + 1 the rectangles of chains at depth d, both in
/// preorder. Blocks of one level share neither rows nor columns; every row has exactly one triangle.
/// Takes time linear in tokens. Throws InputError unless subtree_end is that of a forest in preorder:
/// i < subtree_end[i] <= T, and subtree_end[j] <= subtree_end[i] for i <= j < subtree_end[i].
std::vector<std::vector<MaskBlock>> mask_blocks_by_level(std::span<const int32_t> subtree_end);

/// The rectangles of context keys by level; blocks of a level have disjoint rows. `context_blocks` are rows
/// of five: segment, column_begin, column_end (tokens of the segment), row_begin, row_end (queries that
/// attend to all of them). Throws InputError unless columns lie in their segment ([0,
/// segment_sizes[segment])), rows in [0, num_rows), none is empty, no key of a segment is named twice, and
/// any two row ranges are nested or disjoint.
std::vector<std::vector<MaskBlock>> context_blocks_by_level(std::span<const int64_t> context_blocks,
                                                            std::span<const int64_t> segment_sizes,
                                                            int64_t num_rows);

}  // namespace espalier
