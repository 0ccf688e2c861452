// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/mask_blocks.h"

#include <algorithm>

#include "espalier/base/check.h"

namespace espalier {

std::vector<std::vector<MaskBlock>> mask_blocks_by_level(std::span<const int32_t> subtree_end) {
  const auto num_tokens = static_cast<int64_t>(subtree_end.size());
  std::vector<std::vector<MaskBlock>> levels;
  std::vector<int64_t> open_ends;  // ends of the enclosing chains of the current token, outermost first
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

constexpr size_t kNumbersPerBlock = 5;

std::vector<MaskBlock> checked_context_blocks(std::span<const int64_t> numbers,
                                              std::span<const int64_t> segment_sizes, int64_t num_rows) {
  ESPALIER_CHECK(numbers.size() % kNumbersPerBlock == 0,
                 "context_blocks: expected rows of {}, received {} numbers", kNumbersPerBlock,
                 numbers.size());
  std::vector<MaskBlock> blocks;
  for (size_t i = 0; i < numbers.size(); i += kNumbersPerBlock) {
    const MaskBlock block{numbers[i + 3], numbers[i + 4], numbers[i + 1], numbers[i + 2], false, numbers[i]};
    ESPALIER_CHECK(0 <= block.segment && block.segment < static_cast<int64_t>(segment_sizes.size()),
                   "context_blocks[{}]: expected a segment in [0, {}), received {}", i / kNumbersPerBlock,
                   segment_sizes.size(), block.segment);
    ESPALIER_CHECK(0 <= block.column_begin && block.column_begin < block.column_end &&
                       block.column_end <= segment_sizes[block.segment],
                   "context_blocks[{}]: expected keys inside [0, {}), received [{}, {})",
                   i / kNumbersPerBlock, segment_sizes[block.segment], block.column_begin, block.column_end);
    ESPALIER_CHECK(0 <= block.row_begin && block.row_begin < block.row_end && block.row_end <= num_rows,
                   "context_blocks[{}]: expected queries inside [0, {}), received [{}, {})",
                   i / kNumbersPerBlock, num_rows, block.row_begin, block.row_end);
    blocks.push_back(block);
  }
  std::sort(blocks.begin(), blocks.end(), [](const MaskBlock& a, const MaskBlock& b) {
    return std::pair(a.segment, a.column_begin) < std::pair(b.segment, b.column_begin);
  });
  for (size_t i = 1; i < blocks.size(); ++i) {
    ESPALIER_CHECK(
        blocks[i - 1].segment != blocks[i].segment || blocks[i - 1].column_end <= blocks[i].column_begin,
        "context_blocks: key {} of segment {} is named twice", blocks[i].column_begin, blocks[i].segment);
  }
  return blocks;
}

}  // namespace

std::vector<std::vector<MaskBlock>> context_blocks_by_level(std::span<const int64_t> context_blocks,
                                                            std::span<const int64_t> segment_sizes,
                                                            int64_t num_rows) {
  std::vector<MaskBlock> blocks = checked_context_blocks(context_blocks, segment_sizes, num_rows);
  // Outer row ranges first; stable for equal ranges.
  std::stable_sort(blocks.begin(), blocks.end(), [](const MaskBlock& a, const MaskBlock& b) {
    return std::pair(a.row_begin, -a.row_end) < std::pair(b.row_begin, -b.row_end);
  });
  std::vector<std::vector<MaskBlock>> levels;
  std::vector<int64_t> open_ends;
  for (const MaskBlock& block : blocks) {
    while (!open_ends.empty() && open_ends.back() <= block.row_begin) open_ends.pop_back();
    ESPALIER_CHECK(open_ends.empty() || block.row_end <= open_ends.back(),
                   "context_blocks: queries [{}, {}) overlap others that end at {} without being nested",
                   block.row_begin, block.row_end, open_ends.back());
    const size_t level = open_ends.size();
    if (levels.size() <= level) levels.resize(level + 1);
    levels[level].push_back(block);
    open_ends.push_back(block.row_end);
  }
  return levels;
}

}  // namespace espalier
