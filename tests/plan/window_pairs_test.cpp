// SPDX-License-Identifier: Apache-2.0
// Visible pairs in sliding windows, counted one by one.
#include <gtest/gtest.h>

#include <string>

#include "espalier/plan/loss_work.h"
#include "espalier/plan/planner.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::seeds;

constexpr int64_t kWindows[] = {1, 2, 3, 4, 7, 1000};

/// Tokens on the root path of a token that a query there sees.
int64_t keys_of(const Forest& forest, int64_t token, int64_t window) {
  int64_t keys = 0;
  for (int64_t i = token; i >= 0 && keys < window; i = token_before(forest, i)) ++keys;
  return keys;
}

TEST(WindowPairs, AreThoseOfEveryPlan) {
  int64_t fewer = 0;
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(testing::test_seed(seed), 0x11);
    const testing::Rows rows = testing::random_rows(rng);
    const Forest forest = build_forest(rows.view());
    if (forest.tree_tokens() == 0) continue;
    for (const Strategy strategy :
         {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
      const int64_t budget = strategy == Strategy::kPartition ? 3 : longest_trajectory(forest);
      const Plan plan = make_plan(forest, {.strategy = strategy, .token_budget = budget});
      const std::vector<Load> loads = loads_of(plan.micro_batches, kWindows);
      for (size_t m = 0; m < loads.size(); ++m) {
        ASSERT_EQ(loads[m].window_pairs.size(), std::size(kWindows));
        EXPECT_EQ(loads[m].window_pairs.back(), loads[m].pairs);
        const Layout layout = make_micro_batch_layout(forest, plan.micro_batches[m]);
        for (size_t w = 0; w < std::size(kWindows); ++w) {
          int64_t expected = 0;
          for (const int64_t token : layout.forest_token) expected += keys_of(forest, token, kWindows[w]);
          EXPECT_EQ(loads[m].window_pairs[w], expected) << "window " << kWindows[w];
          fewer += expected < loads[m].pairs;
        }
      }
    }
  }
  EXPECT_GT(fewer, 100);
}

TEST(WindowPairs, OfAStretch) {
  for (const int64_t position : {0, 1, 5, 20}) {
    for (const int64_t size : {1, 2, 9}) {
      for (const int64_t window : kWindows) {
        int64_t expected = 0;
        for (int64_t j = position; j < position + size; ++j) expected += std::min(j + 1, window);
        EXPECT_EQ(pairs_in_window(position, size, window), expected);
      }
    }
  }
}

}  // namespace
}  // namespace espalier
