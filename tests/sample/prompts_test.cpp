// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/engine/step.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

TEST(Prompts, EndBeforeTheFirstTokenWithLoss) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4}, .loss_mask = {0, 0, 1, 0}});
  builder.append({.input_ids = {1, 2, 3}});                          // no mask
  builder.append({.input_ids = {1, 2, 3}, .loss_mask = {0, 0, 0}});  // no loss
  builder.append({.input_ids = {5}});
  builder.append({.input_ids = {1, 2}, .loss_weights = {0, 0.5}});
  const Trajectories prompts = prompts_of(builder.finish());
  std::vector<std::vector<int32_t>> rows;
  for (int64_t r = 0; r < prompts.num_rows(); ++r)
    rows.emplace_back(prompts.row(r).begin(), prompts.row(r).end());
  EXPECT_EQ(rows, (std::vector<std::vector<int32_t>>{{1, 2}, {1, 2, 3}, {1, 2, 3}, {5}, {1}}));
}

TEST(Prompts, OfWholeRowsEndWithTheRows) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4}, .loss_mask = {0, 0, 1, 0}, .logprobs = {0, 0, -1, 0}});
  builder.append({.input_ids = {1, 2, 3}});
  builder.append({.input_ids = {1, 2, 3}, .loss_mask = {0, 0, 0}});
  const Trajectories prompts = prompts_of(builder.finish(), /*whole_rows=*/true);
  EXPECT_EQ(prompts.num_rows(), 3);
  EXPECT_EQ(prompts.num_tokens(), 10);
  builder.append({.input_ids = {1, 2}, .loss_mask = {0, 1}});
  EXPECT_THROW(prompts_of(builder.finish(), /*whole_rows=*/true), InputError);
}

TEST(Prompts, GroupsAreInPreorderAndWithinTheBudget) {
  int64_t groups_seen = 0;
  for (int i = 0; i < 200; ++i) {
    Rng rng(test_seed(i), 0x9209);
    const Trajectories rows =
        random_trajectories(rng, static_cast<Shape>(rng.below(kNumShapes)), {.draws = rng.between(1, 3)});
    const Forest forest = forest_of(rows, {});
    const int64_t budget = rng.between(1, forest.tree_tokens() + 1);
    const auto groups = prompt_groups(forest, budget);
    std::vector<int64_t> order;
    for (const std::vector<int64_t>& group : groups) {
      order.insert(order.end(), group.begin(), group.end());
      const int64_t tokens = forest_of(rows, group).tree_tokens();
      EXPECT_TRUE(tokens <= budget || group.size() == 1) << "seed " << i;
    }
    // Groups are as large as they may be.
    for (size_t g = 0; g + 1 < groups.size(); ++g) {
      std::vector<int64_t> larger = groups[g];
      larger.push_back(groups[g + 1].front());
      EXPECT_GT(forest_of(rows, larger).tree_tokens(), budget) << "seed " << i;
    }
    EXPECT_TRUE(std::ranges::is_sorted(order, {}, [&](int64_t r) { return forest.end_node[r]; }));
    std::ranges::sort(order);
    EXPECT_EQ(order, all_rows(rows));
    groups_seen += static_cast<int64_t>(groups.size());
  }
  EXPECT_GT(groups_seen, 400);
}

}  // namespace
}  // namespace espalier::testing
