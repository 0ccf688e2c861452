// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/examples.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

using Ids = std::vector<int32_t>;

SharingExample example(const Ids& before, const Ids& left, const Ids& right, int64_t common) {
  SharingExample made;
  made.position = std::ssize(before);
  made.before = before;
  made.left = left;
  made.right = right;
  made.common = common;
  return made;
}

std::vector<int64_t> sizes(const ExamplePool& pool) {
  std::vector<int64_t> found;
  for (const SharingExample& chosen : pool.chosen()) found.push_back(chosen.common);
  return found;
}

TEST(ExamplePool, ShowsDifferentOnesWhereThereAreThatMany) {
  ExamplePool pool(3);
  // Two texts at one place, often and large; two other pairs, small.
  for (int64_t k = 0; k < 200; ++k) pool.add(example({1}, {10}, {11}, 900 + k));
  pool.add(example({2}, {20}, {21}, 5));
  pool.add(example({3}, {30}, {31}, 7));
  EXPECT_EQ(sizes(pool), (std::vector<int64_t>{1099, 7, 5}));
}

TEST(ExamplePool, ThoseThatLookTheSameAreOne) {
  ExamplePool pool(3);
  for (int64_t k = 0; k < 5; ++k) pool.add(example({1}, {10}, {11}, k));
  pool.add(example({1}, {11}, {10}, 9));  // the other way round
  EXPECT_EQ(sizes(pool), (std::vector<int64_t>{9}));
  // Control: in another context it is another example.
  pool.add(example({2}, {10}, {11}, 3));
  EXPECT_EQ(sizes(pool), (std::vector<int64_t>{9, 3}));
}

TEST(ExamplePool, OtherPlacesAndNewTextsComeFirst) {
  ExamplePool pool(3);
  // One large place with many branches, of which all are compared with the same one.
  for (int32_t k = 0; k < 300; ++k) pool.add(example({1}, {10}, {100 + k}, 1000 - k));
  pool.add(example({2}, {10}, {50}, 40));  // one text is new, at another place
  pool.add(example({3}, {60}, {61}, 30));
  EXPECT_EQ(sizes(pool), (std::vector<int64_t>{1000, 40, 30}));
  // Places are few: then branches of the same place do.
  ExamplePool few(3);
  for (int32_t k = 0; k < 10; ++k) few.add(example({1}, {10}, {100 + k}, 1000 - k));
  few.add(example({2}, {60}, {61}, 30));
  EXPECT_EQ(sizes(few), (std::vector<int64_t>{1000, 999, 30}));
}

TEST(ExamplePool, KeepsTheLargest) {
  ExamplePool pool(3);
  for (int32_t k = 0; k < 500; ++k) pool.add(example({k}, {1000 + k}, {2000 + k}, k));
  EXPECT_EQ(sizes(pool), (std::vector<int64_t>{499, 498, 497}));
  ExamplePool none(0);
  none.add(example({1}, {2}, {3}, 4));
  EXPECT_TRUE(none.chosen().empty());
}

}  // namespace
}  // namespace espalier::testing
