// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/builder.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/data/packed.h"
#include "espalier/data/reader.h"
#include "espalier/data/writer.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/trajectory_helpers.h"

namespace espalier {
namespace {

using testing::differences;
using testing::message_of;
using testing::random_trajectories;
using testing::ScratchFolder;
using testing::write_bytes;

Trajectories joined(const std::vector<Trajectories>& parts) {
  TrajectoriesBuilder all;
  for (size_t i = 0; i < parts.size(); ++i) all.append(parts[i], fmt::format("file {}", i));
  return all.finish();
}

/// What one file with all rows would hold.
Trajectories rebuilt(const std::vector<Trajectories>& parts) {
  TrajectoriesBuilder builder;
  for (const Trajectories& part : parts) {
    for (int64_t r = 0; r < part.num_rows(); ++r) builder.append(copy_row(part, r));
  }
  return builder.finish();
}

TEST(SeveralSets, EqualsOneFileWithAllRows) {
  int joins = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(seed);
    std::vector<Trajectories> parts;
    for (int64_t i = rng.between(2, 4); i > 0; --i) parts.push_back(random_trajectories(rng));
    int64_t width = 0, topk = 0;
    bool fits = true;
    for (const Trajectories& part : parts) {
      fits &= width == 0 || part.routes_per_token == 0 || width == part.routes_per_token;
      width = std::max(width, part.routes_per_token);
      fits &= topk == 0 || part.ref_topk == 0 || topk == part.ref_topk;
      topk = std::max(topk, part.ref_topk);
    }
    if (!fits) {
      EXPECT_THROW(joined(parts), InputError);
      continue;
    }
    ASSERT_EQ(differences(joined(parts), rebuilt(parts)), "");
    ++joins;
  }
  EXPECT_GT(joins, 40);
}

TEST(SeveralSets, KeepsTheTypesThatAllPartsHave) {
  const ScratchFolder folder;
  TrajectoryRow row;
  row.input_ids = {1, 2};
  row.loss_mask = {0, 1};
  row.logprobs = {0, -0.5};
  TrajectoriesBuilder builder;
  builder.append(row);
  write_packed(folder / "a.safetensors", builder.finish());
  const Trajectories packed = read_trajectories(folder / "a.safetensors");
  const Trajectories both = joined({packed, packed});
  EXPECT_TRUE(std::holds_alternative<Column<uint8_t>>(both.loss_weights.values()));
  EXPECT_TRUE(std::holds_alternative<Column<float>>(both.logprobs.values.values()));
  builder.append(row);
  const Trajectories doubles = builder.finish();
  EXPECT_TRUE(std::holds_alternative<Column<double>>(joined({packed, doubles}).logprobs.values.values()));
}

TEST(SeveralSets, NamesRowsByTheirFile) {
  TrajectoriesBuilder builder;
  TrajectoryRow row;
  row.input_ids = {1};
  builder.append(row);
  builder.append(row);
  const Trajectories part = builder.finish();
  const Trajectories both = joined({part, part});
  EXPECT_EQ(both.name(1), "file 0 row 1");
  EXPECT_EQ(both.name(2), "file 1 row 0");
  EXPECT_EQ(part.name(1), "1");
}

TEST(SeveralSets, RefusesOtherRoutesByTheFilesName) {
  TrajectoryRow row;
  row.input_ids = {1, 2};
  TrajectoriesBuilder builder;
  row.routed_experts = {1, 2};
  builder.append(row);
  const Trajectories one = builder.finish();
  row.routed_experts = {1, 2, 3, 4};
  builder.append(row);
  const Trajectories two = builder.finish();
  EXPECT_EQ(message_of<InputError>([&] { joined({one, two}); }),
            "file 1: field `routed_experts`: expected 1 routes per token, as in earlier files, received 2");
}

TEST(SeveralFiles, AreReadInOrderWithOneReport) {
  const ScratchFolder folder;
  write_bytes(folder / "a.jsonl", "{\"input_ids\":[1],\"x\":1}\nbad\n{\"input_ids\":[2]}\n");
  write_bytes(folder / "b.jsonl", "{\"input_ids\":[3,4],\"loss_mask\":[0,1]}\nbad\n{\"input_ids\":[5]}\n");
  ReadOptions skipping;
  skipping.skip_bad_rows = true;
  write_packed(folder / "c.safetensors", read_trajectories(folder / "b.jsonl", skipping));
  const std::vector<std::filesystem::path> paths = {folder / "b.jsonl", folder / "c.safetensors",
                                                    folder / "a.jsonl"};
  ReadOptions options;
  std::vector<double> fractions;
  options.progress = [&](double fraction) { fractions.push_back(fraction); };
  EXPECT_EQ(message_of<InputError>([&] { read_trajectories(paths, options); }).substr(0, 40),
            ((folder / "b.jsonl").string() + ":2: expected a JSON object").substr(0, 40));
  options.skip_bad_rows = true;
  fractions.clear();
  ReadReport report;
  const Trajectories all = read_trajectories(paths, options, &report);
  EXPECT_EQ(testing::values_of(all.input_ids), (std::vector<int32_t>{3, 4, 5, 3, 4, 5, 1, 2}));
  EXPECT_EQ(report.rows_read, 6);
  EXPECT_EQ(report.rows_skipped, 2);
  EXPECT_EQ(report.fields.tokens, 8);
  ASSERT_EQ(report.first_errors.size(), 2u);
  EXPECT_NE(report.first_errors[1].find("a.jsonl:2: "), std::string::npos);
  EXPECT_EQ(all.name(3), (folder / "c.safetensors").string() + " row 1");
  EXPECT_TRUE(std::is_sorted(fractions.begin(), fractions.end()));
  EXPECT_EQ(fractions.back(), 1.0);
  // A limit counts over all files.
  options.max_rows = 3;
  EXPECT_EQ(testing::values_of(read_trajectories(paths, options, &report).input_ids),
            (std::vector<int32_t>{3, 4, 5, 3, 4}));
  EXPECT_EQ(report.rows_read, 3);
}

}  // namespace
}  // namespace espalier
