// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/advantages.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "espalier/data/builder.h"
#include "espalier/objective/signal.h"
#include "tests/base/message_of.h"
#include "tests/test_seed.h"

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
  EXPECT_NE(message.find("received `reward` without `group_id`"), std::string::npos) << message;
}

TEST(AdvantagesTest, AMissingRewardOrGroupIsNamed) {
  const auto message = [](const TrajectoryRow& row) {
    TrajectoriesBuilder builder;
    builder.append(row);
    const Trajectories trajectories = builder.finish();
    return message_of<InputError>([&] { Advantages(trajectories, {}); });
  };
  EXPECT_NE(message({.input_ids = {1, 2}, .group_id = "a"}).find("received none of them"), std::string::npos);
  EXPECT_NE(message({.input_ids = {1, 2}, .turn_rewards = {2.0}}).find("`turn_rewards` without `group_id`"),
            std::string::npos);
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// Two groups that take turns in the file, and a row without a group.
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

// Of one group: three trajectories with two, three and two turns of a token each.
Trajectories with_turn_rewards() {
  TrajectoriesBuilder builder;
  const auto add = [&](const std::vector<double>& rewards) {
    TrajectoryRow row{.input_ids = {1}, .loss_mask = {0}, .turn_rewards = rewards, .group_id = "g"};
    for (size_t turn = 0; turn < rewards.size(); ++turn) {
      row.input_ids.insert(row.input_ids.end(), {2, 3, 4});
      row.loss_mask.insert(row.loss_mask.end(), {1, 1, 0});
    }
    builder.append(row);
  };
  add({1, 4});
  add({0, 2, 8});
  add({5, -2});
  return builder.finish();
}

TEST(AdvantagesTest, OfTurnsCompareReturnsOfTheSameTurn) {
  const Trajectories trajectories = with_turn_rewards();
  // With a discount of 1/2: returns 3, 4; 3, 6, 8; 4, -2.
  const std::vector<std::vector<double>> returns{{3, 4}, {3, 6, 8}, {4, -2}};
  const auto others = [&](size_t row, size_t turn) {
    std::vector<double> values;
    for (size_t other = 0; other < returns.size(); ++other) {
      if (other != row && turn < returns[other].size()) values.push_back(returns[other][turn]);
    }
    return values;
  };
  const auto expect = [&](const ObjectiveOptions& options, const auto& expected) {
    const Advantages advantages(trajectories, options);
    for (size_t row = 0; row < returns.size(); ++row) {
      for (size_t turn = 0; turn < returns[row].size(); ++turn) {
        const auto position = static_cast<int64_t>(1 + 3 * turn);
        for (const int64_t token : {position, position + 1}) {
          EXPECT_NEAR(advantages.at(static_cast<int64_t>(row), token), expected(row, turn), 1e-14)
              << "row " << row << " turn " << turn;
        }
      }
      EXPECT_EQ(advantages.at(static_cast<int64_t>(row), 0), 0);
    }
  };
  const auto mean_of = [&](size_t row, size_t turn) {
    std::vector<double> all = others(row, turn);
    all.push_back(returns[row][turn]);
    return mean(all);
  };
  expect({.baseline = Baseline::kNone, .scale_rewards = false, .turn_discount = 0.5},
         [&](size_t row, size_t turn) { return returns[row][turn]; });
  expect({.scale_rewards = false, .turn_discount = 0.5},
         [&](size_t row, size_t turn) { return returns[row][turn] - mean_of(row, turn); });
  expect({.baseline = Baseline::kLeaveOneOut, .scale_rewards = false, .turn_discount = 0.5},
         [&](size_t row, size_t turn) {
           const std::vector<double> rest = others(row, turn);
           return rest.empty() ? 0 : returns[row][turn] - mean(rest);  // the only third turn
         });
  expect({.turn_discount = 0.5}, [&](size_t row, size_t turn) {
    std::vector<double> all = others(row, turn);
    all.push_back(returns[row][turn]);
    double squares = 0;
    for (const double value : all) squares += std::pow(value - mean(all), 2);
    const double deviation = all.size() > 1 ? std::sqrt(squares / static_cast<double>(all.size() - 1)) : 0;
    return (returns[row][turn] - mean(all)) / (deviation + 1e-6);
  });
}

TEST(AdvantagesTest, RewardsOfLastTurnsAreThoseOfTrajectories) {
  // A reward at the end, given for the last turn or for the whole: the same without a deviation.
  TrajectoriesBuilder of_turns, of_wholes;
  Rng rng(test_seed(9));
  for (int i = 0; i < 6; ++i) {
    TrajectoryRow row{
        .input_ids = {1, 2, 3, 4, 5, 6}, .loss_mask = {0, 1, 0, 1, 1, 0}, .group_id = i % 2 == 0 ? "a" : "b"};
    const double reward = rng.normal();
    row.turn_rewards = {0, reward};
    of_turns.append(row);
    row.turn_rewards.clear();
    row.reward = reward;
    of_wholes.append(row);
  }
  const Trajectories turns = of_turns.finish(), wholes = of_wholes.finish();
  for (const Baseline baseline :
       {Baseline::kMean, Baseline::kLeaveOneOut, Baseline::kRunning, Baseline::kNone}) {
    for (const double discount : {1.0, 0.5}) {
      const ObjectiveOptions options{.baseline = baseline, .scale_rewards = false, .turn_discount = discount};
      const Advantages a(turns, options), b(wholes, options);
      for (int64_t row = 0; row < 6; ++row) {
        for (const int64_t position : {1, 3, 4}) EXPECT_NEAR(a.at(row, position), b.at(row, position), 1e-14);
      }
    }
  }
}

TEST(AdvantagesTest, AGroupHasRewardsOfOneKind) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2}, .turn_rewards = {1}, .group_id = "g"});
  builder.append({.input_ids = {1, 3}, .reward = 1, .trajectory_id = "odd", .group_id = "g"});
  const Trajectories trajectories = builder.finish();
  const std::string message = message_of<InputError>([&] { Advantages(trajectories, {}); });
  EXPECT_EQ(message,
            "trajectory odd (row 1): expected `turn_rewards`, as the trajectories of its group g before it "
            "have; received `reward`");
}

TEST(AdvantagesTest, RewardsOfTurnsLoseTheirOwnDivergence) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4},
                  .loss_mask = {0, 1, 0, 1},
                  .logprobs = {0, -1, -9, -2},
                  .ref_logprobs = {0, -1.5, -1, -4},
                  .turn_rewards = {3, 5}});
  const Trajectories trajectories = builder.finish();
  const ObjectiveOptions options{.baseline = Baseline::kNone,
                                 .scale_rewards = false,
                                 .turn_discount = 0.5,
                                 .kl_coef = 0.1,
                                 .kl_estimator = KlEstimator::kK1,
                                 .kl_in = KlPlace::kReward};
  const Advantages advantages(trajectories, options);
  EXPECT_NEAR(advantages.at(0, 3), 5 - 0.1 * 2, 1e-15);
  EXPECT_NEAR(advantages.at(0, 1), 3 - 0.1 * 0.5 + 0.5 * (5 - 0.1 * 2), 1e-15);
  EXPECT_NEAR(reward_of(trajectories, 0, options), 8 - 0.1 * 2.5, 1e-14);  // for metrics
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
