// SPDX-License-Identifier: Apache-2.0
// Planning can be stopped under every strategy, and so can distribution over ranks.
#include "espalier/base/interrupt.h"

#include <gtest/gtest.h>

#include "espalier/plan/planner.h"
#include "espalier/plan/ranks.h"
#include "tests/plan/small_decoder.h"
#include "tests/tree/naive.h"

namespace espalier::testing {
namespace {

struct Stopped {};

TEST(Interrupt, StopsPlanning) {
  const Forest forest = build_forest(make_rows({{1, 2, 3}, {1, 2, 4}, {5, 6}}).view());
  for (const Strategy strategy :
       {Strategy::kPartition, Strategy::kTreePacking, Strategy::kSequencePacking, Strategy::kAuto}) {
    const PlanOptions options{.strategy = strategy, .token_budget = 3};
    const Plan plan = make_plan(forest, options);
    const InterruptScope scope([] { throw Stopped(); });
    EXPECT_THROW(make_plan(forest, options), Stopped) << to_string(strategy);
  }
}

TEST(Interrupt, StopsDistribution) {
  const Forest forest = build_forest(make_rows({{1, 2, 3}, {1, 2, 4}, {5, 6}, {5, 7}}).view());
  const TimeModel model = assumed_time_model(kSmallDecoder);
  for (const auto of : {distribute, distribute_trajectories}) {
    const RankPlan plan = of(forest, 2, model);
    const InterruptScope scope([] { throw Stopped(); });
    EXPECT_THROW(of(forest, 2, model), Stopped);
  }
}

}  // namespace
}  // namespace espalier::testing
