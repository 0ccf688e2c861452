// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/epochs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

using Batches = std::vector<std::vector<int64_t>>;

/// One row per entry, of the group that it names ("" for none).
Trajectories grouped(const std::vector<std::string>& groups) {
  Trajectories trajectories = from_rows(std::vector<std::vector<int32_t>>(groups.size(), {1, 2}));
  trajectories.group_id = groups;
  return trajectories;
}

TrainOptions options_of(Shuffle shuffle, int64_t batch_size) {
  TrainOptions options;
  options.shuffle = shuffle;
  options.batch_size = batch_size;
  return options;
}

TEST(EpochBatches, SingleRowsFillOneStepAfterTheOther) {
  const Trajectories trajectories = grouped({"", "", "", "", ""});
  EXPECT_EQ(epoch_batches(trajectories, options_of(Shuffle::kNone, 2), 0), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(epoch_batches(trajectories, options_of(Shuffle::kNone, 0), 0), (Batches{{0, 1, 2, 3, 4}}));
}

TEST(EpochBatches, GroupsAreNotSplitUnlessRowsAreShuffled) {
  const Trajectories trajectories = grouped({"a", "b", "a", "b", "a", "c", "c", "c"});
  EXPECT_EQ(epoch_batches(trajectories, options_of(Shuffle::kNone, 3), 0),
            (Batches{{0, 2, 4}, {1, 3}, {5, 6, 7}}));
  EXPECT_EQ(
      uneven_steps_note(trajectories, options_of(Shuffle::kNone, 3)),
      "groups stay whole, so steps have 2 to 3 trajectories where --batch-size is 3; --shuffle rows takes "
      "trajectories singly");
  const Batches singly = epoch_batches(trajectories, options_of(Shuffle::kRows, 3), 0);
  ASSERT_EQ(singly.size(), 3u);
  EXPECT_EQ(singly[0].size(), 3u);
  EXPECT_EQ(uneven_steps_note(trajectories, options_of(Shuffle::kRows, 3)), "");
}

TEST(EpochBatches, PairsAreNotSplitWhereTheObjectiveComparesThem) {
  Trajectories trajectories = grouped({"a", "a", "b", "b", "", ""});
  trajectories.pair_id = {"x", "y", "y", "x", "z", "z"};
  TrainOptions options = options_of(Shuffle::kRows, 1);
  EXPECT_EQ(epoch_batches(trajectories, options, 0).size(), 6u);
  options.objective = default_options(ObjectiveKind::kDpo);
  const Batches batches = epoch_batches(trajectories, options, 0);
  ASSERT_EQ(batches.size(), 3u);
  for (const std::vector<int64_t>& rows : batches) {
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(trajectories.pair_id[rows[0]], trajectories.pair_id[rows[1]]);
  }
  EXPECT_EQ(uneven_steps_note(trajectories, options),
            "groups and pairs stay whole, so steps have 2 to 2 trajectories where --batch-size is 1");
  // Groups that pairs reach across become one unit.
  options = options_of(Shuffle::kNone, 1);
  options.objective = default_options(ObjectiveKind::kDpo);
  EXPECT_EQ(epoch_batches(trajectories, options, 0), (Batches{{0, 1, 2, 3}, {4, 5}}));
}

TEST(EpochBatches, EqualNamesInTwoSourcesOfAMixAreTwo) {
  Trajectories trajectories = grouped({"a", "b", "a", "a", "b", "a"});
  trajectories.pair_id = {"x", "y", "z", "x", "y", "x"};
  TrainOptions options = options_of(Shuffle::kNone, 1);
  options.mix = {{.name = "first", .num_rows = 3}, {.name = "second", .num_rows = 3}};
  EXPECT_EQ(epoch_batches(trajectories, options, 0), (Batches{{0, 2}, {1}, {3, 5}, {4}}));
  options.shuffle = Shuffle::kRows;
  EXPECT_EQ(epoch_batches(trajectories, options, 0).size(), 6u);
  // Only a source that compares pairs keeps them.
  options.mix[1].objective = default_options(ObjectiveKind::kDpo);
  const Batches batches = epoch_batches(trajectories, options, 0);
  EXPECT_EQ(batches.size(), 5u);
  EXPECT_EQ(std::ranges::count(batches, std::vector<int64_t>{3, 5}), 1);
}

TEST(EpochBatches, GroupsThatFitGiveFullSteps) {
  const Trajectories trajectories = grouped({"a", "a", "b", "b", "c", "c", "d", "d"});
  EXPECT_EQ(epoch_batches(trajectories, options_of(Shuffle::kNone, 4), 0),
            (Batches{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(uneven_steps_note(trajectories, options_of(Shuffle::kNone, 4)), "");
}

TEST(EpochBatches, OneLargeGroupIsOneStep) {
  const Trajectories trajectories = grouped({"a", "a", "a", "a", "a"});
  EXPECT_EQ(epoch_batches(trajectories, options_of(Shuffle::kGroups, 2), 0).size(), 1u);
  EXPECT_EQ(total_steps(trajectories, options_of(Shuffle::kGroups, 2)), 1);
}

TEST(EpochBatches, HaveEveryRowOnceInTheSameNumberOfSteps) {
  for (int trial = 0; trial < 200; ++trial) {
    Rng rng(test_seed(trial), 0xE90C);
    std::vector<std::string> groups;
    const int64_t rows = rng.between(1, 60), kinds = rng.between(1, 30);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t group = rng.below(kinds);
      groups.push_back(group == 0 ? "" : fmt::format("{}", group));
    }
    const Trajectories trajectories = grouped(groups);
    for (const Shuffle shuffle : {Shuffle::kNone, Shuffle::kGroups, Shuffle::kRows}) {
      TrainOptions options = options_of(shuffle, rng.between(1, 20));
      options.seed = trial;
      const int64_t steps = steps_per_epoch(trajectories, options);
      for (int64_t epoch = 0; epoch < 3; ++epoch) {
        const Batches batches = epoch_batches(trajectories, options, epoch);
        ASSERT_EQ(static_cast<int64_t>(batches.size()), steps) << "trial " << trial;
        std::vector<int64_t> all;
        std::map<std::string, std::set<size_t>> steps_of_group;
        for (size_t step = 0; step < batches.size(); ++step) {
          EXPECT_FALSE(batches[step].empty());
          for (const int64_t row : batches[step]) {
            all.push_back(row);
            if (!groups[row].empty()) steps_of_group[groups[row]].insert(step);
          }
        }
        std::sort(all.begin(), all.end());
        EXPECT_EQ(all, all_rows(trajectories));
        if (shuffle == Shuffle::kRows) continue;
        for (const auto& [group, where] : steps_of_group) EXPECT_EQ(where.size(), 1u) << group;
      }
    }
  }
}

}  // namespace
}  // namespace espalier::testing
