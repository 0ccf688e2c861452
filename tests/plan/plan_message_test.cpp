// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/plan_message.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <span>

#include "espalier/base/check.h"
#include "espalier/plan/planner.h"
#include "tests/base/message_of.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier::testing {
namespace {

PlanOptions random_options(Rng& rng, const Forest& forest) {
  constexpr Strategy kStrategies[] = {Strategy::kPartition, Strategy::kTreePacking,
                                      Strategy::kSequencePacking};
  PlanOptions options{.strategy = kStrategies[rng.below(3)],
                      .token_budget = longest_trajectory(forest) + rng.below(8)};
  if (options.strategy == Strategy::kPartition) {
    options.token_budget = rng.between(1, options.token_budget);
    options.checkpoint_activations = CheckpointActivations::kPiece;
    options.offload_context = rng.below(2) == 0;
  }
  return options;
}

TEST(PlanMessage, ReadsBackAsTheSamePlanAndNothingElse) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 0x3E55);
    const Rows rows = random_rows(rng);
    const Forest forest = build_forest(rows.view());
    const std::vector<int64_t> message = pack_plan(make_plan(forest, random_options(rng, forest)));
    ASSERT_EQ(pack_plan(unpack_plan(message, forest)), message);
    // Cut off anywhere, or longer.
    for (size_t size = 0; size < message.size(); size += 1 + message.size() / 40) {
      EXPECT_THROW(unpack_plan(std::span(message).first(size), forest), InputError) << size;
    }
    std::vector<int64_t> longer = message;
    longer.push_back(0);
    EXPECT_THROW(unpack_plan(longer, forest), InputError);
    // With any integer changed it is refused, or read as what it says, within the forest.
    for (int change = 0; change < 40; ++change) {
      std::vector<int64_t> changed = message;
      const int64_t values[] = {-1, INT64_MAX, INT64_MIN, rng.between(-3, 200)};
      changed[rng.below(std::ssize(changed))] = values[rng.below(4)];
      try {
        EXPECT_EQ(pack_plan(unpack_plan(changed, forest)), changed);
      } catch (const InputError&) {
      }
    }
  }
}

TEST(PlanMessage, AnotherForestsTokensAreRefusedByName) {
  const Rows large = make_rows({{1, 2, 3}, {1, 2, 4}}), small = make_rows({{1, 2}});
  const Forest of_large = build_forest(large.view()), of_small = build_forest(small.view());
  const std::vector<int64_t> message = pack_plan(make_plan(of_large, {}));
  const std::string error = message_of<InputError>([&] { unpack_plan(message, of_small); });
  EXPECT_NE(error.find("of a run at integer"), std::string::npos) << error;
}

}  // namespace
}  // namespace espalier::testing
