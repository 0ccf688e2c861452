// SPDX-License-Identifier: Apache-2.0
// TokenSequences::release: when it is called, and that it changes nothing.
#include <gtest/gtest.h>

#include "espalier/tree/forest.h"

namespace espalier {
namespace {

// Rows of one token each, except the last, which is long enough for one release while it is read.
struct LongRow {
  explicit LongRow(int64_t size) : tokens(size + 2) {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i);
    offsets = {0, 1, 2, size + 2};
  }
  std::vector<int64_t> offsets;
  std::vector<int32_t> tokens;
};

int64_t releases(const LongRow& row, Forest* forest) {
  int64_t count = 0;
  *forest = build_forest({.offsets = row.offsets, .tokens = row.tokens, .release = [&count] { ++count; }});
  return count;
}

TEST(ForestRelease, ComesWhileRowsAreReadWhileTheyAreCopiedAndAtTheEnd) {
  Forest forest;
  EXPECT_EQ(releases(LongRow(int64_t{1} << 24), &forest), 3);
  EXPECT_EQ(releases(LongRow(8), &forest), 1);  // the control: too few tokens but for the last one
}

TEST(ForestRelease, ChangesNothing) {
  const LongRow row(100);
  Forest with;
  releases(row, &with);
  const Forest without = build_forest({.offsets = row.offsets, .tokens = row.tokens});
  EXPECT_EQ(with.tokens, without.tokens);
  EXPECT_EQ(with.node_begin, without.node_begin);
  EXPECT_EQ(with.end_node, without.end_node);
}

}  // namespace
}  // namespace espalier
