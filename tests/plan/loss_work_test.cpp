// SPDX-License-Identifier: Apache-2.0
// Loads and work against counts of prefixes, on random forests with loss on random tokens.
#include "espalier/plan/loss_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "espalier/base/interrupt.h"
#include "espalier/plan/planner.h"
#include "tests/plan/small_decoder.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier::testing {
namespace {

LossPositions random_loss(Rng& rng, const Forest& forest) {
  LossPositions loss;
  const int64_t one_in = rng.between(1, 6);
  for (int64_t k = 0; k < forest.num_trajectories(); ++k) {
    for (int64_t position = 1; position < forest.trajectory_size(k); ++position) {
      if (rng.below(one_in) == 0) loss.values.push_back(position);
    }
    loss.end_row();
  }
  return loss;
}

TEST(LossWork, CountsOfRandomForests) {
  for (int trial = 0; trial < 200; ++trial) {
    const uint64_t seed = test_seed(trial);
    SCOPED_TRACE(seed);
    Rng rng(seed);
    Rows rows = random_rows(rng);
    rows.merge_keys.clear();
    rows.tree_keys.clear();
    const Forest forest = build_forest(rows.view());
    const LossPositions loss = random_loss(rng, forest);
    std::set<std::vector<int32_t>> sources;  // prefixes whose last token predicts one with loss
    for (int64_t k = 0; k < loss.num_rows(); ++k) {
      const auto row = rows.tokens.row(k);
      for (const int64_t position : loss.row(k)) sources.emplace(row.begin(), row.begin() + position);
    }
    const int64_t budget = longest_trajectory(forest) + rng.below(9);
    for (const Strategy strategy :
         {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
      const Plan plan = make_plan(forest, {.strategy = strategy, .token_budget = budget});
      const std::vector<Load> loads = loads_with_loss(forest, plan, loss);
      int64_t terms = 0;
      for (const Load& load : loads) terms += load.terms;
      const Work work = work_of(loads), flat = flat_work(forest, loss);
      EXPECT_EQ(terms, static_cast<int64_t>(loss.values.size()));
      EXPECT_LE(work.tokens, plan.num_tokens());
      EXPECT_EQ(flat.logit_rows, terms);
      EXPECT_EQ(flat.tokens, forest.flat_tokens());
      if (strategy == Strategy::kPartition) {
        EXPECT_EQ(work.logit_rows, static_cast<int64_t>(sources.size()));
      } else {
        EXPECT_GE(work.logit_rows, static_cast<int64_t>(sources.size()));
      }
      const LossFlops flops = loss_flops(kSmallDecoder, forest, plan, loss);
      EXPECT_EQ(flops.plan, step_flops(kSmallDecoder, work).total());
      EXPECT_EQ(flops.sequence_packing, step_flops(kSmallDecoder, flat).total());
    }
  }
}

TEST(LossWork, AllTokensButTheFirstOnes) {
  const Forest forest = build_forest(make_rows({{1, 2, 3}, {1}, {1, 2}}).view());
  const LossPositions loss = all_loss_positions(forest);
  EXPECT_EQ(loss.offsets, (std::vector<int64_t>{0, 2, 2, 3}));
  EXPECT_EQ(loss.values, (std::vector<int64_t>{1, 2, 1}));
}

TEST(LossWork, CanBeStopped) {
  struct Stopped {};
  const Forest forest = build_forest(make_rows({{1, 2, 3}, {1, 2, 4}}).view());
  const Plan plan = make_plan(forest, {});
  const InterruptScope scope([] { throw Stopped(); });
  EXPECT_THROW(loads_with_loss(forest, plan, all_loss_positions(forest)), Stopped);
}

}  // namespace
}  // namespace espalier::testing
