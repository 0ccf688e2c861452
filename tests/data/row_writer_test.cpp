// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/row_writer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/data/reader.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/trajectory_helpers.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::differences;
using testing::random_row;
using testing::RandomShape;
using testing::ScratchFolder;
using testing::seeds;
using testing::test_seed;

const std::vector<std::string> kForms = {"a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.safetensors"};

int64_t files_in(const std::filesystem::path& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

/// Three tokens with loss on the last.
TrajectoryRow short_row() {
  TrajectoryRow row;
  row.input_ids = {1, 2, 3};
  row.loss_mask = {0, 0, 1};
  return row;
}

TEST(RowWriter, WritesWhatABuilderTakes) {
  const ScratchFolder folder;
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(test_seed(seed));
    const RandomShape shape(rng);
    std::vector<TrajectoryRow> rows;
    TrajectoriesBuilder builder;
    for (int64_t r = rng.between(1, 9); r > 0; --r) {
      rows.push_back(random_row(rng, shape));
      builder.append(rows.back());
    }
    const Trajectories expected = builder.finish();
    for (const std::string& name : kForms) {
      RowWriter writer(folder / name);
      for (const TrajectoryRow& row : rows) writer.add(row);
      writer.commit();
      ASSERT_EQ(differences(expected, read_trajectories(folder / name)), "") << name;
    }
  }
}

TEST(RowWriter, FormOfALine) {
  const ScratchFolder folder;
  TrajectoryRow row = short_row();
  row.logprobs = {0, std::nan(""), -0.5};
  row.advantage = 2;
  row.turn_rewards = {0.25};
  RowWriter writer(folder / "a.jsonl");
  writer.add(row);
  writer.add({.input_ids = {7}});  // without a mask there is none
  writer.commit();
  EXPECT_EQ(read_text(folder / "a.jsonl"),
            R"({"turn_rewards":[0.25],"advantage":2,"input_ids":[1,2,3],"loss_mask":[0,0,1],)"
            R"("logprobs":[null,null,-0.5]})"
            "\n{\"input_ids\":[7]}\n");
}

TEST(RowWriter, PackedFilesAreTheSameWhateverWasInFiles) {
  const ScratchFolder folder;
  std::vector<std::string> found;
  for (const int64_t memory : {int64_t{1}, int64_t{1} << 40}) {
    RowWriter writer(folder / "a.safetensors", memory);
    for (int32_t r = 0; r < 700; ++r) {
      TrajectoryRow row;
      row.input_ids.assign(1000, r);  // several blocks of a column
      row.logprobs.assign(1000, -0.5);
      row.logprobs[0] = 0;
      row.group_id = std::to_string(r / 8);
      if (r > 300) row.loss_weights.assign(1000, 0.5);
      writer.add(row);
    }
    // The control: with little memory there are files of columns.
    EXPECT_EQ(files_in(folder.path()) > 2, memory == 1) << files_in(folder.path());
    writer.commit();
    found.push_back(read_text(folder / "a.safetensors"));
    EXPECT_EQ(files_in(folder.path()), 1);
  }
  EXPECT_TRUE(found[0] == found[1]);
  EXPECT_EQ(read_trajectories(folder / "a.safetensors").group_id[699], "87");
}

TEST(RowWriter, WithoutCommitTheOldFileStays) {
  const ScratchFolder folder;
  for (const std::string& name : kForms) {
    write_text(folder / name, "old");
    const int64_t before = files_in(folder.path());
    {
      RowWriter writer(folder / name, 1);
      for (int r = 0; r < 300; ++r) writer.add({.input_ids = std::vector<int32_t>(1000, r)});
      EXPECT_GT(files_in(folder.path()), before) << name;
    }
    EXPECT_EQ(files_in(folder.path()), before) << name;
    EXPECT_EQ(read_text(folder / name), "old");
  }
  EXPECT_THROW(RowWriter(folder / "none/a.jsonl"), InputError);
  EXPECT_THROW(RowWriter(folder / "none/a.safetensors"), InputError);
  EXPECT_THROW(RowWriter(folder / "a.safetensors.gz"), InputError);
}

TEST(RowWriter, RefusedRowsLeaveNothing) {
  const ScratchFolder folder;
  TrajectoryRow bad = short_row(), wide = short_row(), wider = short_row();
  bad.logprobs = {0, -1, std::nan("")};  // the last token carries loss
  wide.routed_experts = {1, 2, 3};
  wider.routed_experts = {1, 2, 3, 4, 5, 6};
  for (const std::string& name : kForms) {
    RowWriter writer(folder / name);
    writer.add(wide);
    EXPECT_THROW(writer.add(bad), InputError);
    if (name == "a.safetensors") {
      EXPECT_THROW(writer.add(wider), InputError);
    }
    bad.logprobs = {0, std::nan(""), -1};  // the control
    writer.add(bad);
    bad.logprobs = {0, -1, std::nan("")};
    writer.commit();
    const Trajectories read = read_trajectories(folder / name);
    EXPECT_EQ(read.num_rows(), 2) << name;
    EXPECT_EQ(read.logprobs.values[4], 0);
    EXPECT_EQ(read.logprobs.values[5], -1);
  }
}

}  // namespace
}  // namespace espalier
