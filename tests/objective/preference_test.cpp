// SPDX-License-Identifier: Apache-2.0
// Formulas of preferences, by hand and against finite differences, and what they ask of the data.
#include "espalier/objective/preference.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "espalier/objective/loss.h"
#include "tests/base/message_of.h"
#include "tests/objective/evaluate.h"
#include "tests/objective/random_objective.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

using enum ObjectiveKind;

double log_sigmoid(double x) {
  return -std::log(1 + std::exp(-x));
}

// Trajectory 0 (chosen): two tokens of weight 1; trajectory 1 (rejected): one. The normaliser is sequence-sum
// of two trajectories.
std::vector<Policy> one_pair() {
  const auto term = [](double logprob, double ref, int64_t trajectory, double chosen) {
    return Policy{.logprob = logprob,
                  .coefficient = 0.5,
                  .ref_logprob = ref,
                  .trajectory = trajectory,
                  .weight = 1,
                  .chosen = chosen};
  };
  return {term(-1, -1.5, 0, 1), term(-2, -1.75, 0, 1), term(-0.5, -2.5, 1, 0)};
}
constexpr double kChosenRatio = 0.5 - 0.25, kRejectedRatio = 2;

TEST(Dpo, IsTheLogisticLossOfTheMargin) {
  const Result result = evaluate({.kind = kDpo, .beta = 0.3}, one_pair());
  const double margin = 0.3 * (kChosenRatio - kRejectedRatio);
  EXPECT_NEAR(result.loss(), -log_sigmoid(margin), 1e-15);
  const double pull = 0.3 / (1 + std::exp(margin));
  EXPECT_NEAR(result.gradient[0], -pull, 1e-15);
  EXPECT_NEAR(result.gradient[1], -pull, 1e-15);
  EXPECT_NEAR(result.gradient[2], pull, 1e-15);
  EXPECT_NEAR(result.metric("reward_margin"), margin, 1e-15);
  EXPECT_NEAR(result.metric("chosen_reward"), 0.3 * kChosenRatio, 1e-15);
  EXPECT_EQ(result.metric("reward_accuracy"), 0);
}

TEST(Ipo, IsTheSquaredDistanceOfMeans) {
  const Result result = evaluate({.kind = kIpo, .beta = 0.25}, one_pair());
  const double distance = kChosenRatio / 2 - kRejectedRatio - 2;
  EXPECT_NEAR(result.loss(), distance * distance, 1e-14);
  EXPECT_NEAR(result.gradient[0], 2 * distance / 2, 1e-14);
  EXPECT_NEAR(result.gradient[2], -2 * distance, 1e-14);
}

TEST(Simpo, ComparesMeansWithoutAReference) {
  const Result result = evaluate({.kind = kSimpo, .beta = 2, .margin = 0.7}, one_pair());
  EXPECT_NEAR(result.loss(), -log_sigmoid(2 * (-1.5 + 0.5) - 0.7), 1e-14);
}

TEST(Orpo, AddsTheOddsRatioToCrossEntropy) {
  const Result result = evaluate({.kind = kOrpo, .beta = 0.4}, one_pair());
  const double p = std::exp(-1.5), q = std::exp(-0.5);
  EXPECT_NEAR(result.loss(), 1.5 - 0.4 * log_sigmoid(std::log(p / (1 - p) / (q / (1 - q)))), 1e-14);
}

TEST(Kto, WeighsTrajectoriesAroundTheReferencePoint) {
  const ObjectiveOptions options{
      .kind = kKto, .normalize = Normalize::kSequenceSum, .beta = 0.3, .chosen_weight = 2};
  const double point = (kChosenRatio + kRejectedRatio) / 2;
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const Result result = evaluate(options, one_pair());
  EXPECT_NEAR(result.metric("reference_point"), point, 1e-15);
  EXPECT_NEAR(result.loss(),
              0.5 * 2 * (1 - sigmoid(0.3 * (kChosenRatio - point))) +
                  0.5 * (1 - sigmoid(0.3 * (point - kRejectedRatio))),
              1e-15);
}

TEST(Kto, TakesTheReferencePointFromTrajectoriesOfNoKind) {
  const ObjectiveOptions options{.kind = kKto, .normalize = Normalize::kSequenceSum, .beta = 0.3};
  std::vector<Policy> terms = one_pair();
  for (Policy& term : terms) term.coefficient = 1.0 / 3;
  terms.push_back({.logprob = -1,
                   .coefficient = 1.0 / 3,
                   .ref_logprob = -1.25,
                   .trajectory = 2,
                   .weight = 1,
                   .chosen = -1});
  const Result result = evaluate(options, terms);
  EXPECT_NEAR(result.metric("reference_point"), 0.25, 1e-15);
  EXPECT_EQ(result.gradient[3], 0);
  // The mean is over the other two.
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  EXPECT_NEAR(result.loss(), 0.5 * (1 - sigmoid(0)) + 0.5 * (1 - sigmoid(0.3 * (0.25 - 2))), 1e-15);
  // A reference point below 0 counts as 0.
  terms.back().ref_logprob = 0;
  EXPECT_EQ(evaluate(options, terms).metric("reference_point"), 0);
}

// Trajectories 2 g and 2 g + 1 are pair g, in any order of chosen and rejected.
std::vector<Policy> random_pairs(Rng& rng, double normaliser) {
  std::vector<Policy> terms;
  const int64_t pairs = rng.between(1, 3);
  for (int64_t k = 0; k < 2 * pairs; ++k) {
    const bool flipped = (k / 2) % 2 == 1;
    for (int64_t t = rng.between(1, 5); t > 0; --t) {
      const double weight = 0.2 + rng.uniform(), logprob = -0.3 - 2 * rng.uniform();
      terms.push_back({.logprob = logprob,
                       .coefficient = weight / normaliser,
                       .ref_logprob = logprob + rng.normal() / 2,
                       .trajectory = k,
                       .weight = weight,
                       .chosen = (k % 2 == 0) != flipped ? 1.0 : 0.0,
                       .pair = k / 2});
    }
  }
  const double per_trajectory = static_cast<double>(2 * pairs) / normaliser;
  for (Policy& term : terms) term.coefficient /= per_trajectory;
  return terms;
}

TEST(PreferenceTest, RandomPairsEqualThePlainFormAndFiniteDifferences) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(test_seed(seed), 0x9A1);
    const ObjectiveKind kinds[] = {kDpo, kIpo, kSimpo, kOrpo};  // the reference point of kto is detached
    ObjectiveOptions options = random_objective(rng, kinds[seed % 4]);
    if (options.kind == kIpo) options.beta *= 20;  // losses of the size of 1, of which differences are taken
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(options)));
    const std::vector<Policy> terms = random_pairs(rng, 1 + rng.uniform());
    expect_finite_differences(options, terms);
    options.kind = kKto;
    evaluate(options, terms);
  }
}

// The point of kto is detached; where it is 0 it does not move, and differences can tell.
TEST(PreferenceTest, TheGradientOfKtoIsAFiniteDifference) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Rng rng(test_seed(seed), 0x9A2);
    const ObjectiveOptions options = random_objective(rng, kKto);
    std::vector<Policy> terms = random_pairs(rng, 1);
    for (Policy& term : terms) term.ref_logprob = term.logprob + rng.uniform();  // the mean is below 0
    expect_finite_differences(options, terms);
  }
}

std::string fault_of_rows(const std::vector<TrajectoryRow>& rows, ObjectiveKind kind) {
  TrajectoriesBuilder builder;
  for (const TrajectoryRow& row : rows) builder.append(row);
  const Trajectories trajectories = builder.finish();
  return message_of<InputError>([&] { Loss(trajectories, default_options(kind)); });
}

TEST(PairsTest, MustBeWhole) {
  const TrajectoryRow chosen{
      .input_ids = {1, 2}, .ref_logprobs = {0, -1}, .chosen = true, .trajectory_id = "first", .pair_id = "p"};
  TrajectoryRow rejected = chosen;
  rejected.chosen = false;
  EXPECT_EQ(fault_of_rows({chosen, rejected}, kDpo), "");
  EXPECT_NE(fault_of_rows({chosen}, kDpo).find("pair p: expected a chosen and a rejected"),
            std::string::npos);
  EXPECT_NE(
      fault_of_rows({chosen, chosen}, kDpo).find("expected one chosen trajectory, received rows 0 and 1"),
      std::string::npos);
  TrajectoryRow changed = rejected;
  changed.pair_id = "";
  EXPECT_NE(fault_of_rows({chosen, changed}, kSimpo).find("no `pair_id`"), std::string::npos);
  changed = rejected;
  changed.chosen.reset();
  EXPECT_NE(fault_of_rows({chosen, changed}, kOrpo).find("no `chosen`"), std::string::npos);
  changed = rejected;
  changed.loss_mask = {1, 0};
  EXPECT_NE(fault_of_rows({chosen, changed}, kDpo).find("expects tokens with loss"), std::string::npos);
  changed = rejected;
  changed.ref_logprobs.clear();
  EXPECT_NE(fault_of_rows({chosen, changed}, kIpo).find("expects `ref_logprobs`"), std::string::npos);
  EXPECT_EQ(fault_of_rows({chosen, changed}, kSimpo), "");
  changed.chosen.reset();
  EXPECT_NE(fault_of_rows({changed}, kKto).find("expects `chosen`"), std::string::npos);
  // A row without loss would not count in the mean of kto, nor in its reference point.
  for (const std::optional<bool> kind : {std::optional(true), std::optional(false), std::optional<bool>()}) {
    changed = rejected;
    EXPECT_EQ(fault_of_rows({chosen, changed}, kKto), "");
    changed.chosen = kind;
    changed.loss_mask = {1, 0};
    EXPECT_NE(fault_of_rows({chosen, changed}, kKto).find("(row 1): a preference expects tokens with loss"),
              std::string::npos);
  }
}

TEST(PairsTest, ChooseTheirNormalisers) {
  const auto fault = [](const ObjectiveOptions& options) {
    return message_of<InputError>([&] { check_objective_options(options); });
  };
  EXPECT_EQ(fault({.kind = kDpo, .normalize = Normalize::kConstant, .normalize_constant = 3}), "");
  EXPECT_NE(fault({.kind = kDpo}).find("normalize: objective dpo expects"), std::string::npos);
  EXPECT_NE(
      fault({.kind = kDpo, .shared_targets = SharedTargets::kOnce, .normalize = Normalize::kSequenceSum})
          .find("shared-targets"),
      std::string::npos);
  ObjectiveOptions options = default_options(kDpo);
  options.beta = 0;
  EXPECT_EQ(fault(options).find("--beta"), 0u);
}

}  // namespace
}  // namespace espalier::testing
