// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/chunk_scan/chunk_tree.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

// A node of 7 tokens and two children of 1 and 4, in chunks of at most 4, with a state wanted inside a child.
TEST(ChunkTree, ChunksStayInsideNodes) {
  const std::vector<int32_t> prev{-1, 0, 1, 2, 3, 4, 5, 6, 6, 8, 9, 10};
  const std::vector<int64_t> ends{8};
  const detail::ChunkTree chunks = detail::make_chunk_tree(prev, ends, 4);
  ASSERT_EQ(chunks.num_levels(), 4);
  ASSERT_EQ(chunks.buckets.size(), 2u);
  EXPECT_EQ(chunks.buckets[0].length, 1);
  EXPECT_EQ(chunks.buckets[0].token, (std::vector<int64_t>{7, 8}));
  EXPECT_EQ(chunks.buckets[1].length, 4);
  EXPECT_EQ(chunks.buckets[1].token, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 6, 9, 10, 11, 11}));
  EXPECT_EQ(chunks.buckets[1].size, (std::vector<int64_t>{4, 3, 3}));
  EXPECT_EQ(chunks.source.values, (std::vector<int64_t>{0, 0, 0, 0, 1}));
  EXPECT_EQ(chunks.source.offsets, (std::vector<int64_t>{0, 1, 2, 4, 5}));
  EXPECT_EQ(chunks.place, (std::vector<int64_t>{2, 3, 4, 5, 6, 7, 8, 0, 1, 10, 11, 12}));
  EXPECT_EQ(chunks.end.offsets, (std::vector<int64_t>{0, 0, 0, 1, 1}));
  EXPECT_EQ(chunks.end.values, (std::vector<int64_t>{1}));
}

}  // namespace
}  // namespace espalier::testing
