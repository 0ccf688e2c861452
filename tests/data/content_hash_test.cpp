// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/trajectories.h"

#include <gtest/gtest.h>

#include <fstream>

#include "espalier/data/builder.h"
#include "espalier/data/reader.h"
#include "espalier/data/writer.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using testing::ScratchFolder;
using Hashes = std::map<std::string, std::string>;

std::vector<TrajectoryRow> rows() {
  std::vector<TrajectoryRow> rows(3);
  rows[0].input_ids = {1, 2, 3};
  rows[0].loss_mask = {0, 1, 1};
  rows[1].input_ids = {1, 2};
  rows[1].logprobs = {0, -0.5};
  rows[1].advantages = {0.25, 0.5};
  rows[1].reward = 1;
  rows[1].group_id =
      std::string("g");  // GCC 12 sees an overflow where a literal is assigned (its bug 105651)
  rows[1].chosen = true;
  rows[2].input_ids = {4};
  rows[2].pair_id = std::string("p");
  for (TrajectoryRow& row : rows) row.trajectory_id = std::string("name");
  return rows;
}

Trajectories built(const std::vector<TrajectoryRow>& rows) {
  TrajectoriesBuilder builder;
  for (const TrajectoryRow& row : rows) builder.append(row);
  return builder.finish();
}

// Names of the columns in which two sets differ.
std::vector<std::string> differing(const Hashes& a, const Hashes& b) {
  std::vector<std::string> names;
  for (const Hashes* some : {&a, &b}) {
    for (const auto& [name, hash] : *some) {
      const bool equal = a.contains(name) && b.contains(name) && a.at(name) == b.at(name);
      if (!equal && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

TEST(ContentHashes, EveryColumnCountsForItself) {
  const Hashes hashes = content_hashes(built(rows()));
  EXPECT_EQ(hashes, content_hashes(built(rows())));
  std::vector<std::string> names;
  for (const auto& [name, hash] : hashes) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"advantages", "chosen", "group_id", "input_ids", "logprobs",
                                             "loss_weights", "pair_id", "reward"}));
  const auto change = [&](const char* column, auto apply) {
    std::vector<TrajectoryRow> changed = rows();
    apply(changed);
    EXPECT_EQ(differing(hashes, content_hashes(built(changed))), std::vector<std::string>{column});
  };
  using Rows = std::vector<TrajectoryRow>;
  change("input_ids", [](Rows& r) { r[2].input_ids = {5}; });
  change("loss_weights", [](Rows& r) { r[0].loss_mask = {0, 1, 0}; });
  change("logprobs", [](Rows& r) { r[1].logprobs[1] = -0.25; });
  change("logprobs",
         [](Rows& r) { r[2].logprobs = {0}; });  // zeros that are there are not zeros that are not
  change("ref_logprobs", [](Rows& r) { r[0].ref_logprobs = {0, -1, -1}; });
  change("advantages", [](Rows& r) { r[1].advantages[0] = 0; });
  change("reward", [](Rows& r) { r[1].reward = 2; });
  change("reward", [](Rows& r) { r[0].reward = 0; });
  change("temperature", [](Rows& r) { r[0].temperature = 0.5; });
  change("top_k", [](Rows& r) { r[0].top_k = 5; });
  change("top_p", [](Rows& r) { r[0].top_p = 0.5; });
  change("chosen", [](Rows& r) { r[1].chosen = false; });
  change("group_id", [](Rows& r) { std::swap(r[0].group_id, r[1].group_id); });
  change("pair_id", [](Rows& r) { r[2].pair_id = "q"; });
  change("turn_rewards", [](Rows& r) { r[0].turn_rewards = {1}; });
  change("routed_experts", [](Rows& r) {
    for (TrajectoryRow& row : r) row.routed_experts.assign(row.input_ids.size(), 1);
  });
}

TEST(ContentHashes, RowsAreWhereTheyAreCut) {
  std::vector<TrajectoryRow> a(2), b(2);
  a[0].input_ids = {1, 2};
  a[1].input_ids = {3};
  b[0].input_ids = {1};
  b[1].input_ids = {2, 3};
  EXPECT_EQ(differing(content_hashes(built(a)), content_hashes(built(b))),
            std::vector<std::string>{"input_ids"});
}

TEST(ContentHashes, FilesOfEveryFormAgree) {
  const ScratchFolder folder;
  const Trajectories original = built(rows());
  const Hashes hashes = content_hashes(original);
  for (const char* name : {"rows.jsonl", "rows.jsonl.gz", "rows.safetensors"}) {
    write_trajectories(folder / name, original);
    EXPECT_EQ(content_hashes(read_trajectories(folder / name, {})), hashes) << name;
  }
  // A mask and the same as weights; names that differ.
  std::vector<TrajectoryRow> other = rows();
  other[0].loss_mask.clear();
  other[0].loss_weights = {0, 1, 1};
  other[1].trajectory_id = "another";
  EXPECT_EQ(content_hashes(built(other)), hashes);
}

}  // namespace
}  // namespace espalier
