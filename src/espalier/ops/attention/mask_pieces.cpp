// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/mask_pieces.h"

#include <algorithm>

#include "espalier/base/check.h"

namespace espalier {

std::vector<std::vector<Piece>> pieces_by_level(std::span<const int32_t> subtree_end) {
  const auto num_tokens = static_cast<int64_t>(subtree_end.size());
  std::vector<std::vector<Piece>> levels;
  std::vector<int64_t> open_ends;  // of the stretches above the present token, outermost first
  int64_t begin = 0;
  while (begin < num_tokens) {
    const int64_t subtree = subtree_end[begin];
    while (!open_ends.empty() && open_ends.back() <= begin) open_ends.pop_back();
    const int64_t limit = open_ends.empty() ? num_tokens : open_ends.back();
    ESPALIER_CHECK(
        begin < subtree && subtree <= limit,
        "subtree_end[{}]: expected a value in [{}, {}] (a subtree lies inside its parent's), received {}",
        begin, begin + 1, limit, subtree);
    int64_t end = begin + 1;
    while (end < subtree && subtree_end[end] == subtree) ++end;

    if (levels.empty()) levels.emplace_back();
    levels[0].push_back({begin, end, begin, end, true});
    if (end < subtree) {
      open_ends.push_back(subtree);
      const size_t level = open_ends.size();
      if (levels.size() <= level) levels.resize(level + 1);
      levels[level].push_back({end, subtree, begin, end, false});
    }
    begin = end;
  }
  return levels;
}

namespace {

constexpr size_t kNumbersPerPiece = 5;

std::vector<Piece> checked_context_pieces(std::span<const int64_t> numbers,
                                          std::span<const int64_t> segment_sizes, int64_t num_rows) {
  ESPALIER_CHECK(numbers.size() % kNumbersPerPiece == 0,
                 "context_pieces: expected rows of {}, received {} numbers", kNumbersPerPiece,
                 numbers.size());
  std::vector<Piece> pieces;
  for (size_t i = 0; i < numbers.size(); i += kNumbersPerPiece) {
    const Piece piece{numbers[i + 3], numbers[i + 4], numbers[i + 1], numbers[i + 2], false, numbers[i]};
    ESPALIER_CHECK(0 <= piece.segment && piece.segment < static_cast<int64_t>(segment_sizes.size()),
                   "context_pieces[{}]: expected a segment in [0, {}), received {}", i / kNumbersPerPiece,
                   segment_sizes.size(), piece.segment);
    ESPALIER_CHECK(0 <= piece.column_begin && piece.column_begin < piece.column_end &&
                       piece.column_end <= segment_sizes[piece.segment],
                   "context_pieces[{}]: expected keys inside [0, {}), received [{}, {})",
                   i / kNumbersPerPiece, segment_sizes[piece.segment], piece.column_begin, piece.column_end);
    ESPALIER_CHECK(0 <= piece.row_begin && piece.row_begin < piece.row_end && piece.row_end <= num_rows,
                   "context_pieces[{}]: expected queries inside [0, {}), received [{}, {})",
                   i / kNumbersPerPiece, num_rows, piece.row_begin, piece.row_end);
    pieces.push_back(piece);
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.segment, a.column_begin) < std::pair(b.segment, b.column_begin);
  });
  for (size_t i = 1; i < pieces.size(); ++i) {
    ESPALIER_CHECK(
        pieces[i - 1].segment != pieces[i].segment || pieces[i - 1].column_end <= pieces[i].column_begin,
        "context_pieces: key {} of segment {} is named twice", pieces[i].column_begin, pieces[i].segment);
  }
  return pieces;
}

}  // namespace

std::vector<std::vector<Piece>> context_pieces_by_level(std::span<const int64_t> context_pieces,
                                                        std::span<const int64_t> segment_sizes,
                                                        int64_t num_rows) {
  std::vector<Piece> pieces = checked_context_pieces(context_pieces, segment_sizes, num_rows);
  // Outer row ranges first; equal ones keep the order of their keys.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.row_begin, -a.row_end) < std::pair(b.row_begin, -b.row_end);
  });
  std::vector<std::vector<Piece>> levels;
  std::vector<int64_t> open_ends;
  for (const Piece& piece : pieces) {
    while (!open_ends.empty() && open_ends.back() <= piece.row_begin) open_ends.pop_back();
    ESPALIER_CHECK(open_ends.empty() || piece.row_end <= open_ends.back(),
                   "context_pieces: queries [{}, {}) overlap others that end at {} without being nested",
                   piece.row_begin, piece.row_end, open_ends.back());
    const size_t level = open_ends.size();
    if (levels.size() <= level) levels.resize(level + 1);
    levels[level].push_back(piece);
    open_ends.push_back(piece.row_end);
  }
  return levels;
}

}  // namespace espalier
