// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/trajectories.h"

#include <gtest/gtest.h>

#include "espalier/data/builder.h"
#include "tests/data/trajectory_helpers.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::seeds;

TEST(SliceRows, AreTheRowsByThemselves) {
  for (uint64_t seed = 0; seed < seeds(100); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(testing::test_seed(seed));
    const Trajectories all = testing::random_trajectories(rng);
    const int64_t begin = rng.below(all.num_rows()), end = rng.between(begin + 1, all.num_rows());
    const Trajectories slice = slice_rows(all, begin, end);
    TrajectoriesBuilder of_slice, of_rows;
    for (int64_t row = 0; row < slice.num_rows(); ++row) of_slice.append(copy_row(slice, row));
    for (int64_t row = begin; row < end; ++row) of_rows.append(copy_row(all, row));
    ASSERT_EQ(testing::differences(of_slice.finish(), of_rows.finish()), "");
    for (int64_t row = begin; row < end; ++row) {
      EXPECT_EQ(slice.logprobs.has(row - begin), all.logprobs.has(row));
      EXPECT_EQ(slice.reward.has(row - begin), all.reward.has(row));
    }
  }
}

TEST(SliceRows, OutliveWhatTheyView) {
  Trajectories slice;
  {
    TrajectoriesBuilder builder;
    for (int i = 0; i < 4; ++i) builder.append({.input_ids = {i, i + 1}, .logprobs = {0, -0.5 * i}});
    const Trajectories all = builder.finish();
    slice = slice_rows(all, 2, 4);
  }
  EXPECT_EQ(testing::values_of(slice.input_ids), (std::vector<int32_t>{2, 3, 3, 4}));
  EXPECT_EQ(slice.logprobs.values[3], -1.5);
}

TEST(SliceRows, KeepTheNamesOfRows) {
  TrajectoriesBuilder all;
  for (const char* name : {"a.jsonl", "b.jsonl"}) {
    TrajectoriesBuilder builder;
    for (int i = 0; i < 3; ++i) builder.append({.input_ids = {1}});
    all.append(builder.finish(), name);
  }
  const Trajectories slice = slice_rows(all.finish(), 2, 6);
  EXPECT_EQ(slice.name(0), "a.jsonl row 2");
  EXPECT_EQ(slice.name(1), "b.jsonl row 0");
  EXPECT_EQ(slice.name(3), "b.jsonl row 2");
}

}  // namespace
}  // namespace espalier
