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

struct Rank : Group {
  Rank(int64_t rank, int64_t size) : own(rank), all(size) {}
  int64_t rank() const override { return own; }
  int64_t size() const override { return all; }
  int64_t own, all;
};

TEST(Prompts, AreInPreorderAndEachOnOneRank) {
  for (int i = 0; i < 50; ++i) {
    Rng rng(test_seed(i), 0x9209);
    const Trajectories rows =
        random_trajectories(rng, static_cast<Shape>(rng.below(kNumShapes)), {.draws = rng.between(1, 3)});
    const Forest forest = forest_of(rows, {});
    std::vector<int64_t> order = prompt_order(forest), of_ranks;
    EXPECT_TRUE(std::ranges::is_sorted(order, {}, [&](int64_t r) { return forest.end_node[r]; }));
    const int64_t ranks = rng.between(2, 5);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const std::vector<int64_t> own = prompt_order(forest, Rank(rank, ranks));
      of_ranks.insert(of_ranks.end(), own.begin(), own.end());
    }
    EXPECT_EQ(of_ranks, order);
    std::ranges::sort(order);
    EXPECT_EQ(order, all_rows(rows));
  }
}

}  // namespace
}  // namespace espalier::testing
