// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/advantages.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "espalier/objective/signal.h"
#include "tests/base/message_of.h"

namespace espalier::testing {
namespace {

Trajectories rewarded() {
  TrajectoriesBuilder builder;
  const auto add = [&](double reward, const std::string& group, std::optional<double> advantage = {}) {
    builder.append({.input_ids = {1, 2}, .advantage = advantage, .reward = reward, .group_id = group});
  };
  add(1, "a");
  add(5, "b");
  add(0, "a");
  add(0, "a", 42);
  return builder.finish();
}

TEST(AdvantagesTest, AreRewardsOverTheGroup) {
  const Trajectories trajectories = rewarded();
  const Advantages advantages(trajectories, {});
  // Rewards 1, 0, 0: mean 1/3, standard deviation sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3).
  const double deviation = std::sqrt(1.0 / 3);
  EXPECT_NEAR(advantages.at(0, 1), (2.0 / 3) / (deviation + 1e-6), 1e-14);
  EXPECT_NEAR(advantages.at(2, 1), (-1.0 / 3) / (deviation + 1e-6), 1e-14);
  EXPECT_EQ(advantages.at(1, 1), 0);   // a group of one
  EXPECT_EQ(advantages.at(3, 0), 42);  // its own; its reward still counts in the group's mean
}

TEST(AdvantagesTest, AreNotDividedWithoutScaling) {
  const Trajectories trajectories = rewarded();
  const Advantages advantages(trajectories, {.scale_rewards = false});
  EXPECT_NEAR(advantages.at(0, 1), 2.0 / 3, 1e-15);
  EXPECT_NEAR(advantages.at(2, 0), -1.0 / 3, 1e-15);
  EXPECT_EQ(advantages.at(1, 0), 0);
}

TEST(AdvantagesTest, OfEqualRewardsAreZero) {
  TrajectoriesBuilder builder;
  for (int i = 0; i < 3; ++i) builder.append({.input_ids = {1, 2}, .reward = 0.1, .group_id = "g"});
  const Trajectories trajectories = builder.finish();
  const Advantages advantages(trajectories, {});
  for (int64_t row = 0; row < 3; ++row) EXPECT_EQ(advantages.at(row, 1), 0);
}

TEST(AdvantagesTest, MissingOnesNameTheRow) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2}, .advantage = 1});
  builder.append({.input_ids = {1, 2}, .reward = 1.0, .trajectory_id = "lonely"});
  const Trajectories trajectories = builder.finish();
  const std::string message = message_of<InputError>([&] { Advantages(trajectories, {}); });
  EXPECT_NE(message.find("lonely"), std::string::npos) << message;
  EXPECT_NE(message.find("group_id"), std::string::npos) << message;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// Two groups that take turns in the file, and a row of its own.
Trajectories alternating() {
  TrajectoriesBuilder builder;
  const auto add = [&](double reward, const std::string& group) {
    builder.append({.input_ids = {1, 2}, .reward = reward, .group_id = group});
  };
  add(1, "a");
  add(5, "b");
  add(4, "a");
  add(7, "b");
  add(2, "a");
  add(9, "c");
  return builder.finish();
}

void expect_advantages(const ObjectiveOptions& options, const std::vector<double>& expected) {
  const Trajectories trajectories = alternating();
  const Advantages advantages(trajectories, options);
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    EXPECT_NEAR(advantages.at(row, 1), expected[row], 1e-14) << "row " << row;
  }
}

TEST(AdvantagesTest, LeaveOneOutComparesWithTheOthers) {
  expect_advantages({.baseline = Baseline::kLeaveOneOut, .scale_rewards = false},
                    {1 - mean({4, 2}), 5.0 - 7, 4 - mean({1, 2}), 7.0 - 5, 2 - mean({1, 4}), 0});
}

TEST(AdvantagesTest, LeaveOneOutMayBeScaled) {
  const double a = std::sqrt((std::pow(4.0 / 3, 2) + std::pow(5.0 / 3, 2) + std::pow(1.0 / 3, 2)) / 2);
  const double b = std::sqrt(2.0);
  expect_advantages({.baseline = Baseline::kLeaveOneOut}, {-2 / (a + 1e-6), -2 / (b + 1e-6), 2.5 / (a + 1e-6),
                                                           2 / (b + 1e-6), -0.5 / (a + 1e-6), 0});
}

TEST(AdvantagesTest, RunningComparesWithTheGroupsBefore) {
  const double before_b = mean({1, 4, 2}), before_c = mean({1, 4, 2, 5, 7});
  expect_advantages({.baseline = Baseline::kRunning, .scale_rewards = false},
                    {1, 5 - before_b, 4, 7 - before_b, 2, 9 - before_c});
}

TEST(AdvantagesTest, WithoutABaselineAreRewards) {
  expect_advantages({.baseline = Baseline::kNone, .scale_rewards = false}, {1, 5, 4, 7, 2, 9});
  // They need no group.
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2}, .reward = 3});
  builder.append({.input_ids = {1, 2}, .reward = 5});
  const Trajectories trajectories = builder.finish();
  EXPECT_EQ(Advantages(trajectories, {.baseline = Baseline::kNone, .scale_rewards = false}).at(0, 1), 3);
  EXPECT_EQ(Advantages(trajectories, {.baseline = Baseline::kRunning, .scale_rewards = false}).at(1, 1), 2);
  EXPECT_THROW(Advantages(trajectories, {.baseline = Baseline::kLeaveOneOut}), InputError);
}

TEST(AdvantagesTest, FallWithTheTurnsThatFollow) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4, 5, 6, 7}, .loss_mask = {1, 1, 1, 0, 1, 0, 1}, .reward = 8});
  builder.append({.input_ids = {1, 2}, .advantage = 3});
  const Trajectories trajectories = builder.finish();
  const Advantages advantages(trajectories,
                              {.baseline = Baseline::kNone, .scale_rewards = false, .turn_discount = 0.5});
  EXPECT_EQ(advantages.at(0, 1), 2);  // two turns follow
  EXPECT_EQ(advantages.at(0, 2), 2);
  EXPECT_EQ(advantages.at(0, 4), 4);
  EXPECT_EQ(advantages.at(0, 6), 8);
  EXPECT_EQ(advantages.at(1, 1), 3);  // its own stay as they are
}

TEST(AdvantagesTest, RewardsLoseTheDivergenceOfTheBehaviourPolicy) {
  TrajectoriesBuilder builder;
  // The token without loss, and the first one, do not count.
  builder.append({.input_ids = {1, 2, 3, 4},
                  .loss_mask = {1, 1, 0, 1},
                  .logprobs = {0, -1, -9, -2},
                  .ref_logprobs = {0, -1.5, -1, -4},
                  .reward = 3});
  const Trajectories trajectories = builder.finish();
  const auto reward = [&](KlEstimator estimator) {
    return reward_of(trajectories, 0, {.kl_coef = 0.1, .kl_estimator = estimator, .kl_in = KlPlace::kReward});
  };
  EXPECT_NEAR(reward(KlEstimator::kK1), 3 - 0.1 * (0.5 + 2), 1e-15);
  EXPECT_NEAR(reward(KlEstimator::kK2), 3 - 0.1 * (0.125 + 2), 1e-15);
  EXPECT_NEAR(reward(KlEstimator::kK3), 3 - 0.1 * (std::exp(-0.5) - 0.5 + std::exp(-2) + 1), 1e-15);
  EXPECT_EQ(reward_of(trajectories, 0, {.kl_coef = 0.1}), 3);  // in the loss
}

TEST(AdvantagesTest, DivergenceInTheRewardNeedsWhatItIsMadeOf) {
  const ObjectiveOptions options{
      .baseline = Baseline::kNone, .scale_rewards = false, .kl_coef = 1, .kl_in = KlPlace::kReward};
  const auto message = [&](const TrajectoryRow& row) {
    TrajectoriesBuilder builder;
    builder.append(row);
    const Trajectories trajectories = builder.finish();
    return message_of<InputError>([&] { Advantages(trajectories, options); });
  };
  EXPECT_NE(message({.input_ids = {1, 2}, .reward = 1}).find("neither of them"), std::string::npos);
  EXPECT_NE(message({.input_ids = {1, 2}, .logprobs = {0, -1}, .reward = 1}).find("no `ref_logprobs`"),
            std::string::npos);
  EXPECT_NE(message({.input_ids = {1, 2}, .advantage = 1, .reward = 1}).find("received advantages"),
            std::string::npos);
}

TEST(SignalTest, CountsGroupsAndMoments) {
  TrajectoriesBuilder builder;
  const auto add = [&](double reward, const std::string& group) {
    builder.append({.input_ids = {1, 2, 3}, .loss_mask = {1, 0, 1}, .reward = reward, .group_id = group});
  };
  add(1, "a");
  add(3, "a");
  add(2, "b");
  add(2, "b");
  add(7, "c");
  const Trajectories trajectories = builder.finish();
  const Loss loss(trajectories, {.kind = ObjectiveKind::kDrGrpo, .scale_rewards = false});
  const std::vector<int64_t> rows{0, 1, 2, 3};
  const Signal signal = signal_of(loss, rows);
  EXPECT_EQ(signal.reward.count, 4);
  EXPECT_EQ(signal.reward.mean, 2);
  EXPECT_DOUBLE_EQ(signal.reward.deviation, std::sqrt(0.5));
  EXPECT_EQ(signal.reward.least, 1);
  EXPECT_EQ(signal.reward.most, 3);
  EXPECT_EQ(signal.advantage.mean, 0);
  EXPECT_EQ(signal.advantage.least, -1);
  EXPECT_EQ(signal.groups, 2);
  EXPECT_EQ(signal.groups_without_signal, 1);
  const auto metrics = signal_metrics(loss, rows);
  EXPECT_EQ(metrics.front().first, "reward_mean");
  EXPECT_EQ(metrics.back(), (std::pair<std::string, double>("groups_without_signal", 1)));
  EXPECT_TRUE(signal_metrics(Loss(trajectories, ObjectiveOptions{}), rows).empty());
  const std::vector<std::string> warnings = signal_warnings(loss);
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_NE(warnings[0].find("1 of 3 groups has only one trajectory"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[1].find("2 of 3 groups have no signal"), std::string::npos) << warnings[1];
}

TEST(SignalTest, SaysThatNothingIsTrained) {
  TrajectoriesBuilder builder;
  for (int i = 0; i < 2; ++i) builder.append({.input_ids = {1, 2}, .reward = 1, .group_id = "a"});
  const Trajectories trajectories = builder.finish();
  const auto warnings = signal_warnings(Loss(trajectories, {.kind = ObjectiveKind::kGrpo}));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("all advantages are 0"), std::string::npos);
}

}  // namespace
}  // namespace espalier::testing
