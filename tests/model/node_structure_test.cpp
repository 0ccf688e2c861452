// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/node_structure.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"

namespace espalier {
namespace {

// 0: [0 1]     1: [2]    2: [3 4 5]  below 1
//              3: [6]                below 0
// 4: [7 8]     5: [9]                a second root
TEST(NodeStructure, ByHand) {
  const NodeStructure nodes = make_node_structure({0, 2, 3, 6, 7, 9, 10}, {-1, 0, 1, 0, -1, 4});
  EXPECT_EQ(nodes.num_tokens(), 10);
  EXPECT_EQ(nodes.num_nodes(), 6);
  EXPECT_EQ(nodes.prev, (std::vector<int32_t>{-1, 0, 1, 2, 3, 4, 1, -1, 7, 8}));
  EXPECT_EQ(nodes.levels.offsets, (std::vector<int64_t>{0, 2, 5, 6}));
  EXPECT_EQ(nodes.levels.values, (std::vector<int64_t>{0, 4, 1, 3, 5, 2}));
  EXPECT_TRUE(nodes.cuts.empty());
}

TEST(NodeStructure, ASequenceIsOneNode) {
  const NodeStructure nodes = make_node_structure({0, 3}, {-1});
  EXPECT_EQ(nodes.prev, (std::vector<int32_t>{-1, 0, 1}));
  EXPECT_EQ(nodes.levels.num_rows(), 1);
}

TEST(NodeStructure, RefusesEmptyNodesAndParentsThatComeLater) {
  EXPECT_THROW(make_node_structure({0, 2, 2}, {-1, 0}), InternalError);
  EXPECT_THROW(make_node_structure({0, 2, 3}, {1, -1}), InternalError);
  EXPECT_THROW(make_node_structure({0, 2}, {-1, 0}), InternalError);
}

}  // namespace
}  // namespace espalier
