// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/data/reader.h"
#include "espalier/data/writer.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/trajectory_helpers.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::differences;
using testing::random_row;
using testing::random_trajectories;
using testing::RandomShape;
using testing::ScratchFolder;
using testing::seeds;
using testing::test_seed;

const std::vector<std::string> kNames = {"a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.safetensors"};

TEST(RoundTrip, RandomTrajectoriesReadBackEqual) {
  const ScratchFolder folder;
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(test_seed(seed));
    const Trajectories written = random_trajectories(rng);
    Trajectories last = written;
    // Each form is written from what the form before it gave.
    for (const std::string& name : kNames) {
      write_trajectories(folder / name, last);
      last = read_trajectories(folder / name);
      ASSERT_EQ(differences(written, last), "") << name;
    }
    write_trajectories(folder / "again.jsonl", last);
    ASSERT_EQ(read_text(folder / "again.jsonl"), read_text(folder / "a.jsonl"));
  }
}

TEST(RoundTrip, ComparisonSeesEveryColumn) {
  // Negative control: rows that differ in one field are not equal.
  Rng rng(test_seed(5));
  RandomShape shape(rng);
  shape.weights = shape.mask = 0;
  shape.logprobs = shape.ref_logprobs = shape.advantages = shape.reward = shape.chosen = shape.routes =
      shape.choice = 2;
  TrajectoryRow row = random_row(rng, shape);
  row.trajectory_id = row.group_id = row.pair_id = "x";
  row.turn_rewards.clear();
  row.reward = 1;
  row.advantage.reset();
  row.advantages.assign(row.input_ids.size(), 1.0);
  const auto build = [](const TrajectoryRow& source) {
    TrajectoriesBuilder builder;
    builder.append(source);
    return builder.finish();
  };
  const auto changed = [&](auto change) {
    TrajectoryRow other = row;
    change(other);
    return differences(build(row), build(other));
  };
  EXPECT_EQ(changed([](TrajectoryRow&) {}), "");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.input_ids[0] ^= 1; }), "input_ids");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.loss_weights.assign(r.input_ids.size(), 0.5); }),
            "loss_weights");
  EXPECT_EQ(changed([](TrajectoryRow& r) {
              r.logprobs.back() -= 1;
              r.logprobs[0] = 0;
              r.logprobs.clear();
            }),
            "logprobs");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.ref_logprobs.clear(); }), "ref_logprobs");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.advantages.back() = 2; }), "advantages");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.reward = *r.reward + std::abs(*r.reward) + 1; }), "reward");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.temperature = 3; }), "temperature");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.top_k = 3; }), "top_k");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.top_p = 0.125; }), "top_p");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.chosen = !*r.chosen; }), "chosen");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.trajectory_id = "y"; }), "trajectory_id");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.group_id = "y"; }), "group_id");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.pair_id = "y"; }), "pair_id");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.routed_experts[0] ^= 1; }), "routed_experts");
  row = {.input_ids = {1, 2},
         .turn_rewards = {1},
         .ref_topk_ids = {-1, -1, 3, 4},
         .ref_topk_logprobs = {0, 0, -1, -2}};
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.turn_rewards = {2}; }), "turn_rewards");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.ref_topk_ids[2] = 5; }), "ref_topk_ids");
  EXPECT_EQ(changed([](TrajectoryRow& r) { r.ref_topk_logprobs[3] = -3; }), "ref_topk_logprobs");
}

TEST(RoundTrip, CompressedFilesAreCompressed) {
  const ScratchFolder folder;
  TrajectoriesBuilder builder;
  TrajectoryRow row;
  row.input_ids.assign(1000, 7);
  for (int i = 0; i < 2000; ++i) builder.append(row);
  const Trajectories trajectories = builder.finish();
  for (const std::string& name : kNames) write_trajectories(folder / name, trajectories);
  const std::string plain = read_text(folder / "a.jsonl");
  EXPECT_GT(plain.size(), size_t{3} << 20);  // more than one block of the reader and the writer
  EXPECT_TRUE(read_text(folder / "a.jsonl.gz").starts_with("\x1F\x8B"));
  EXPECT_TRUE(read_text(folder / "a.jsonl.zst").starts_with("\x28\xB5\x2F\xFD"));
  EXPECT_LT(read_text(folder / "a.jsonl.gz").size(), plain.size() / 10);
  EXPECT_LT(read_text(folder / "a.jsonl.zst").size(), plain.size() / 10);
  for (const std::string& name : kNames)
    EXPECT_EQ(differences(trajectories, read_trajectories(folder / name)), "") << name;
}

TEST(Writer, RefusesWhatWouldNotReadBack) {
  const ScratchFolder folder;
  Rng rng(test_seed(1));
  EXPECT_THROW(write_trajectories(folder / "a.safetensors.gz", random_trajectories(rng)), InputError);
  Trajectories bad;
  bad.offsets = Column<int64_t>(std::vector<int64_t>{0, 1});
  bad.input_ids = Column<int32_t>(std::vector<int32_t>{1});
  bad.loss_weights = Column<double>(std::vector<double>{std::nan("")});
  EXPECT_THROW(write_trajectories(folder / "a.jsonl", bad), InputError);
  bad.loss_weights = Column<uint8_t>(std::vector<uint8_t>{1});
  bad.group_id = {"\xff"};
  EXPECT_THROW(write_trajectories(folder / "a.jsonl", bad), InputError);
  EXPECT_FALSE(std::filesystem::exists(folder / "a.jsonl"));
  EXPECT_THROW(write_trajectories(folder / "none/a.jsonl", bad), InputError);
}

TEST(Writer, FormOfALine) {
  const ScratchFolder folder;
  TrajectoryRow row;
  row.input_ids = {1, 2};
  row.loss_mask = {0, 1};
  row.logprobs = {0, -0.1};
  row.advantage = -0.0;
  row.reward = 1e300;
  row.chosen = true;
  row.group_id = "g\"\n";
  row.routed_experts = {3, 4};
  TrajectoriesBuilder builder;
  builder.append(row);
  write_trajectories(folder / "a.jsonl", builder.finish());
  EXPECT_EQ(read_text(folder / "a.jsonl"),
            R"({"group_id":"g\"\u000a","chosen":true,"reward":1e+300,"input_ids":[1,2],"loss_mask":[0,1],)"
            R"("logprobs":[null,-0.1],"advantages":[-0.0,-0.0],"routed_experts":[[3],[4]]})"
            "\n");
}

}  // namespace
}  // namespace espalier
