// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/builder.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"
#include "tests/data/trajectory_helpers.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::differences;
using testing::message_of;
using testing::random_row;
using testing::RandomShape;
using testing::test_seed;
using testing::values_of;

TrajectoryRow row_of(std::vector<int32_t> ids) {
  TrajectoryRow row;
  row.input_ids = std::move(ids);
  return row;
}

TEST(TrajectoriesBuilder, FillsWhatRowsLack) {
  TrajectoriesBuilder builder;
  builder.append(row_of({1, 2}));
  TrajectoryRow full = row_of({3, 4, 5});
  full.loss_weights = {0, 0.5, 2};
  full.logprobs = {0, -1, -2};
  full.advantage = 3;
  full.reward = 7;
  full.chosen = false;
  full.group_id = "g";
  full.routed_experts = {1, 2, 3, 4, 5, 6};
  builder.append(full);
  TrajectoryRow masked = row_of({6});
  masked.loss_mask = {0};
  builder.append(masked);
  const Trajectories t = builder.finish();
  EXPECT_EQ(values_of(t.offsets), (std::vector<int64_t>{0, 2, 5, 6}));
  EXPECT_EQ(values_of(t.loss_weights), (std::vector<double>{1, 1, 0, 0.5, 2, 0}));
  EXPECT_EQ(values_of(t.logprobs.values), (std::vector<double>{0, 0, 0, -1, -2, 0}));
  EXPECT_FALSE(t.logprobs.has(0));
  EXPECT_TRUE(t.logprobs.has(1));
  EXPECT_FALSE(t.logprobs.has(2));
  EXPECT_FALSE(t.ref_logprobs.any());
  EXPECT_EQ(values_of(t.advantages.values), (std::vector<double>{0, 0, 3, 3, 3, 0}));
  EXPECT_EQ(values_of(t.reward.values), (std::vector<double>{0, 7, 0}));
  EXPECT_EQ(values_of(t.chosen.present), (std::vector<uint8_t>{0, 1, 0}));
  EXPECT_EQ(t.group_id, (std::vector<std::string>{"", "g", ""}));
  EXPECT_TRUE(t.trajectory_id.empty());
  EXPECT_EQ(t.routes_per_token, 2);
  EXPECT_EQ(values_of(t.routed_experts), (std::vector<int32_t>{-1, -1, -1, -1, 1, 2, 3, 4, 5, 6, -1, -1}));
  EXPECT_EQ(builder.num_rows(), 0);
}

TEST(TrajectoriesBuilder, MasksStayBytesAndFullColumnsNeedNoPresence) {
  TrajectoriesBuilder builder;
  for (int i = 0; i < 3; ++i) {
    TrajectoryRow row = row_of({i, i});
    row.loss_mask = {0, 1};
    row.reward = i;
    builder.append(row);
  }
  const Trajectories t = builder.finish();
  EXPECT_TRUE(std::holds_alternative<Column<uint8_t>>(t.loss_weights.values()));
  EXPECT_TRUE(t.reward.any());
  EXPECT_TRUE(t.reward.present.empty());
}

TEST(TrajectoriesBuilder, RefusedRowsLeaveNothing) {
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  std::vector<std::pair<const char*, TrajectoryRow>> bad;
  const auto add = [&bad](const char* field, auto change) {
    TrajectoryRow row = row_of({1, 2, 3});
    change(row);
    bad.emplace_back(field, row);
  };
  add("input_ids", [](auto& r) { r.input_ids.clear(); });
  add("input_ids", [](auto& r) { r.input_ids[1] = -1; });
  add("input_ids", [](auto& r) { r.input_ids[1] = 50; });
  add("loss_mask", [](auto& r) { r.loss_mask = {1, 1}; });
  add("loss_mask", [](auto& r) { r.loss_mask = {1, 1, 2}; });
  add("loss_mask", [](auto& r) { r.loss_mask = {1, 1, 1}, r.loss_weights = {1, 1, 1}; });
  add("loss_weights", [](auto& r) { r.loss_weights = {1, -1, 1}; });
  add("loss_weights", [&](auto& r) { r.loss_weights = {1, nan, 1}; });
  add("logprobs", [](auto& r) { r.logprobs = {0, -1}; });
  add("logprobs", [](auto& r) { r.logprobs = {-1, -1, -1}; });
  add("logprobs", [](auto& r) { r.logprobs = {0, -1, 0.5}; });
  add("ref_logprobs", [&](auto& r) { r.ref_logprobs = {0, -1, -infinity}; });
  add("advantages", [&](auto& r) { r.advantages = {0, 1, nan}; });
  add("advantages", [](auto& r) { r.advantages = {0, 1, 2}, r.advantage = 1; });
  add("advantage", [&](auto& r) { r.advantage = infinity; });
  add("reward", [&](auto& r) { r.reward = nan; });
  add("temperature", [](auto& r) { r.temperature = -0.5; });
  add("temperature", [&](auto& r) { r.temperature = infinity; });
  add("top_k", [](auto& r) { r.top_k = 2.5; });
  add("top_k", [](auto& r) { r.top_k = -2; });
  add("top_p", [](auto& r) { r.top_p = 0; });
  add("top_p", [](auto& r) { r.top_p = 1.5; });
  add("turn_rewards", [](auto& r) { r.turn_rewards = {1}, r.reward = 1; });
  add("turn_rewards", [](auto& r) { r.turn_rewards = {1, 2}; });  // there is one turn
  add("turn_rewards", [](auto& r) { r.turn_rewards = {1}, r.loss_mask = {1, 0, 0}; });
  add("turn_rewards", [&](auto& r) { r.turn_rewards = {nan}; });
  const auto add_topk = [&](const char* field, std::vector<int32_t> ids, std::vector<double> logprobs) {
    add(field, [&](auto& r) { r.ref_topk_ids = ids, r.ref_topk_logprobs = logprobs; });
  };
  add_topk("ref_topk_logprobs", {-1, 1, 2}, {});
  add_topk("ref_topk_ids", {-1, -1, 1, 2}, {0, 0, -1, -2});
  add_topk("ref_topk_ids", {1, 1, 2}, {0, -1, -2});  // the first token has none
  add_topk("ref_topk_ids", {-1, 50, 2}, {0, -1, -2});
  add_topk("ref_topk_ids", {-1, -1, 1, -1, 3, 4}, {0, 0, -1, 0, -2, -3});
  add_topk("ref_topk_ids", {-1, -1, 1, 1, 3, 4}, {0, 0, -1, -1, -2, -3});
  add_topk("ref_topk_logprobs", {-1, 1, 2}, {0, -1, 0.5});
  add_topk("ref_topk_logprobs", {-1, -1, 2}, {0, -1, -0.5});
  add("routed_experts", [](auto& r) { r.routed_experts = {1, 2}; });
  add("routed_experts", [](auto& r) { r.routed_experts = {1, -1, 2}; });
  add("routed_experts", [](auto& r) { r.routed_experts = {1, 2, 3, 4, 5, 6}; });  // other rows: 1 per token

  const uint64_t seed = 3;
  SCOPED_TRACE(fmt::format("seed {}", seed));
  Rng rng(test_seed(seed));
  RandomShape shape(rng);
  shape.routes = shape.routes_per_token = 1;
  TrajectoriesBuilder clean, tried;
  TrajectoryRow routed = row_of({1});
  routed.routed_experts = {4};
  clean.append(routed);
  tried.append(routed);
  for (const auto& [field, row] : bad) {
    const std::string message = message_of<InputError>([&, &row = row] { tried.append(row, 50); });
    EXPECT_TRUE(message.starts_with(fmt::format("field `{}`: expected ", field))) << field << ": " << message;
    const TrajectoryRow good = random_row(rng, shape);
    clean.append(good);
    tried.append(good);
  }
  EXPECT_EQ(differences(clean.finish(), tried.finish()), "");
}

TEST(CopyRow, GivesBackWhatWasAppended) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(test_seed(seed));
    const Trajectories first = testing::random_trajectories(rng);
    TrajectoriesBuilder builder;
    for (int64_t r = 0; r < first.num_rows(); ++r) builder.append(copy_row(first, r));
    ASSERT_EQ(differences(first, builder.finish()), "");
  }
}

TEST(Trajectories, NamesRowsByIdOrNumber) {
  TrajectoriesBuilder builder;
  TrajectoryRow named = row_of({1});
  named.trajectory_id = "t7";
  builder.append(row_of({1}));
  builder.append(named);
  EXPECT_EQ(builder.num_rows(), 2);
  const Trajectories t = builder.finish();
  EXPECT_EQ(t.name(0), "0");
  EXPECT_EQ(t.name(1), "t7");
}

TEST(RouteKeys, DifferExactlyWhereRoutesDiffer) {
  TrajectoriesBuilder builder;
  builder.append(row_of({1, 2}));
  TrajectoryRow row;
  for (int32_t a = 0; a < 40; ++a) {
    for (int32_t b = 0; b < 40; ++b) {
      row.input_ids.push_back(1);
      row.routed_experts.insert(row.routed_experts.end(), {a, b});
    }
  }
  builder.append(row);
  builder.append(row);
  const std::vector<uint64_t> keys = route_keys(builder.finish());
  ASSERT_EQ(keys.size(), 2 + 2 * 1600u);
  EXPECT_EQ(keys[0], keys[1]);
  EXPECT_EQ(std::set<uint64_t>(keys.begin(), keys.end()).size(), 1601u);
  for (size_t i = 0; i < 1600; ++i) ASSERT_EQ(keys[2 + i], keys[1602 + i]);
  builder.append(row_of({1}));
  EXPECT_TRUE(route_keys(builder.finish()).empty());
}

}  // namespace
}  // namespace espalier
