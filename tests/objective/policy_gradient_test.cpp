// SPDX-License-Identifier: Apache-2.0
// Formulas of policy gradients: single terms by hand, and all of them against finite differences and their
// plain form on random terms.
#include "espalier/objective/policy_gradient.h"

#include <gtest/gtest.h>

#include <algorithm>
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

TEST(Grpo, ClipsFurtherAboveThanBelow) {
  ObjectiveOptions options = default_options(kDapo);
  EXPECT_EQ(options.clip_high, 0.28);
  EXPECT_NEAR(evaluate(options, {{-1, 2, -2, true, 1}}).loss(), -1.28 * 2, 1e-14);
  EXPECT_NEAR(evaluate(options, {{-3, -2, -2, true, 1}}).loss(), 0.8 * 2, 1e-14);
}

TEST(Grpo, DualClipBoundsNegativeAdvantages) {
  ObjectiveOptions options{.kind = kPpo, .dual_clip = 3};
  // Ratio e^2 with a negative advantage: the bound takes over, and there is no gradient.
  const Result bounded = evaluate(options, {{-1, -2, -3, true, 0.5}});
  EXPECT_NEAR(bounded.loss(), 0.5 * 3 * 2, 1e-14);
  EXPECT_EQ(bounded.gradient[0], 0);
  EXPECT_EQ(bounded.metric("clip_fraction"), 1);
  // Below the bound, and where the advantage is positive, nothing changes.
  for (const Policy& term : {Policy{-1, -2, -2, true, 0.5}, Policy{-1, 2, -3, true, 0.5}}) {
    const Result with = evaluate(options, {term});
    options.dual_clip = 0;
    EXPECT_EQ(with.loss(), evaluate(options, {term}).loss());
    options.dual_clip = 3;
  }
}

TEST(Gspo, TakesOneRatioForATrajectory) {
  const ObjectiveOptions options{.kind = kGspo, .clip_low = 0.2, .clip_high = 0.2};
  // Trajectory 0: log-ratios 0.3 and -0.1 of equal weight; trajectory 1: 2, clipped.
  const Result result = evaluate(
      options,
      {{-1, 1, -1.3, true, 0.25, -1, 0}, {-1, 1, -0.9, true, 0.25, -1, 0}, {-1, 3, -3, true, 0.5, -1, 1}});
  const double ratio = std::exp(0.1);
  EXPECT_NEAR(result.loss(), -(0.5 * ratio + 0.5 * 1.2 * 3), 1e-14);
  // d/dlog p of s (c1 A + c2 A): s / 2 each of the two terms.
  EXPECT_NEAR(result.gradient[0], -0.25 * ratio, 1e-14);
  EXPECT_NEAR(result.gradient[1], -0.25 * ratio, 1e-14);
  EXPECT_EQ(result.gradient[2], 0);
  EXPECT_EQ(result.metric("clip_fraction"), 1);
  EXPECT_NEAR(result.metric("ratio_max"), std::exp(2), 1e-13);
}

TEST(Cispo, KeepsTheGradientOfClippedTerms) {
  const ObjectiveOptions options = default_options(kCispo);
  // Ratio e^3 above 5: the weight is 5; ratio e^-3 is not clipped.
  const Result result = evaluate(options, {{-1, 2, -4, true, 0.5}, {-4, 2, -1, true, 0.5}});
  EXPECT_NEAR(result.gradient[0], -0.5 * 5 * 2, 1e-13);
  EXPECT_NEAR(result.gradient[1], -0.5 * std::exp(-3) * 2, 1e-14);
  EXPECT_NEAR(result.loss(), 0.5 * 5 * 2 * 1 + 0.5 * std::exp(-3) * 2 * 4, 1e-13);
  EXPECT_EQ(result.metric("clip_fraction"), 1);
}

TEST(Reinforce, WeighsLogprobsByAdvantages) {
  const ObjectiveOptions options = default_options(kReinforce);
  const Result result = evaluate(options, {{-1, 2, -3, true, 0.5}, {-2, -1, 0, false, 0.25}});
  EXPECT_NEAR(result.loss(), -(0.5 * 2 * -1 + 0.25 * -1 * -2), 1e-15);
  EXPECT_NEAR(result.gradient[0], -0.5 * 2, 1e-15);
  EXPECT_NEAR(result.gradient[1], 0.25, 1e-15);
  EXPECT_NEAR(result.metric("ratio_max"), std::exp(2), 1e-14);
}

TEST(Opd, FollowsTheReverseDivergence) {
  // Ratio e^0.5 to the policy of the samples; the teacher finds the token less likely by 1.
  const Result result = evaluate({.kind = kOpd}, {{-1, 0, -1.5, true, 0.5, -2}, {-3, 0, 0, false, 2, -1, 1}});
  EXPECT_NEAR(result.loss(), 0.5 * std::exp(0.5) * 1 + 2 * -2, 1e-14);
  EXPECT_NEAR(result.gradient[0], 0.5 * std::exp(0.5), 1e-14);
  EXPECT_NEAR(result.gradient[1], 2 * -2, 1e-14);
  EXPECT_NEAR(result.metric("reverse_kl"), 1 - 2, 1e-15);
}

TEST(ImportanceWeightsTest, AreTruncatedOrMaskedByToken) {
  ObjectiveOptions options{.kind = kReinforce, .importance_weights = ImportanceWeights::kTruncate};
  // Ratios e, 1 / e, e^0.5, and one without a behaviour policy.
  const std::vector<Policy> terms{
      {-1, 1, -2, true, 1}, {-2, 1, -1, true, 1}, {-1, 1, -1.5, true, 1}, {-1, 1, 0, false, 1, -1, 1}};
  const Result truncated = evaluate(options, terms);
  EXPECT_NEAR(truncated.gradient[0], -2, 1e-14);
  EXPECT_NEAR(truncated.gradient[1], -std::exp(-1), 1e-14);
  EXPECT_NEAR(truncated.gradient[2], -std::exp(0.5), 1e-14);
  EXPECT_EQ(truncated.gradient[3], -1);
  EXPECT_EQ(truncated.metric("importance_clipped"), 1);
  EXPECT_NEAR(truncated.metric("importance_mean"), 3 + std::exp(-1) + std::exp(0.5), 1e-14);
  options.importance_weights = ImportanceWeights::kMask;
  const Result masked = evaluate(options, terms);
  EXPECT_EQ(masked.gradient[0], 0);
  EXPECT_EQ(masked.gradient[1], 0);
  EXPECT_NEAR(masked.gradient[2], -std::exp(0.5), 1e-14);
  EXPECT_EQ(masked.gradient[3], -1);
  EXPECT_EQ(masked.metric("importance_clipped"), 2);
}

TEST(ImportanceWeightsTest, AreProductsOverTrajectories) {
  const ObjectiveOptions options{.kind = kReinforce,
                                 .importance_weights = ImportanceWeights::kMask,
                                 .importance_level = ImportanceLevel::kSequence};
  const Result result = evaluate(
      options, {{-1, 1, -2, true, 1, -1, 0}, {-2, 3, -1.5, true, 1, -1, 0}, {-1, 1, -2, true, 1, -1, 1}});
  EXPECT_NEAR(result.gradient[0], -std::exp(0.5), 1e-14);
  EXPECT_NEAR(result.gradient[1], -3 * std::exp(0.5), 1e-14);
  EXPECT_EQ(result.gradient[2], 0);  // e is above 2
}

TEST(ImportanceWeightsTest, LetTheClippedRatioBeginAtOne) {
  const ObjectiveOptions options{.kind = kGrpo, .importance_weights = ImportanceWeights::kTruncate};
  const Result result = evaluate(options, {{-1, 3, -1.5, true, 0.5}});
  EXPECT_NEAR(result.loss(), -0.5 * 3 * std::exp(0.5), 1e-14);
  EXPECT_NEAR(result.gradient[0], -0.5 * 3 * std::exp(0.5), 1e-14);
  EXPECT_EQ(result.metric("ratio_max"), 1);
  EXPECT_NEAR(result.metric("mismatch_kl"), std::exp(0.5) - 1.5, 1e-14);
}

TEST(DivergenceTest, IsThatOfTheReference) {
  for (const auto& [estimator, loss, gradient] :
       {std::tuple(KlEstimator::kK1, 0.5, 1.0), std::tuple(KlEstimator::kK2, 0.125, 0.5),
        std::tuple(KlEstimator::kK3, std::exp(-0.5) - 0.5, 1 - std::exp(-0.5))}) {
    const ObjectiveOptions options{.kind = kGrpo, .kl_coef = 0.1, .kl_estimator = estimator};
    const Result result = evaluate(options, {{-1, 0, 0, false, 2, -1.5}});
    EXPECT_NEAR(result.loss(), 2 * 0.1 * loss, 1e-15);
    EXPECT_NEAR(result.gradient[0], 2 * 0.1 * gradient, 1e-15);
    EXPECT_NEAR(result.metric("ref_kl"), loss, 1e-15);
  }
}

std::vector<Policy> random_terms(Rng& rng) {
  std::vector<Policy> terms;
  const int64_t trajectories = rng.between(1, 4);
  for (int64_t k = 0; k < trajectories; ++k) {
    const bool has_old = rng.below(3) > 0;
    for (int64_t t = rng.between(1, 5); t > 0; --t) {
      const double logprob = -0.5 - 2 * rng.uniform();
      terms.push_back({logprob, rng.normal(), logprob + rng.normal() / 2, has_old, 0.1 + rng.uniform(),
                       logprob + rng.normal() / 2, k});
    }
  }
  return terms;
}

// evaluate() compares value and gradient with the plain form.
TEST(PolicyGradientTest, RandomTermsEqualThePlainForm) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Rng rng(test_seed(seed), 0x0B1);
    const ObjectiveOptions options = random_objective(rng);
    EXPECT_NO_THROW(check_objective_options(options)) << describe(options);
    if (is_preference(options.kind)) continue;
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(options)));
    evaluate(options, random_terms(rng));
  }
}

// Where nothing is detached: every trajectory has a behaviour policy, and ratios are no weights.
TEST(PolicyGradientTest, GradientsAreFiniteDifferences) {
  int64_t compared = 0;
  for (uint64_t seed = 0; seed < 120; ++seed) {
    Rng rng(test_seed(seed), 0x0B2);
    const ObjectiveKind kinds[] = {kSft, kPpo, kGrpo, kDrGrpo, kDapo, kGspo, kReinforce};
    ObjectiveOptions options = random_objective(rng, kinds[rng.below(std::size(kinds))]);
    options.importance_weights = ImportanceWeights::kNone;
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(options)));
    std::vector<Policy> terms = random_terms(rng);
    for (Policy& term : terms) term.has_old = true;
    expect_finite_differences(options, terms);
    compared += std::ssize(terms);
  }
  EXPECT_GT(compared, 400);
}

Trajectories one_row(TrajectoryRow row) {
  TrajectoriesBuilder builder;
  builder.append(std::move(row));
  return builder.finish();
}

TEST(LossTest, NamesTheRowThatLacksWhatTheObjectiveReads) {
  const Trajectories rows = one_row({.input_ids = {1, 2}, .advantage = 1, .trajectory_id = "without"});
  const auto message = [&](const ObjectiveOptions& options) {
    return message_of<InputError>([&] { Loss(rows, options); });
  };
  const std::string reference = message({.kind = kGspo, .kl_coef = 0.1});
  EXPECT_NE(reference.find("without"), std::string::npos) << reference;
  EXPECT_NE(reference.find("ref_logprobs"), std::string::npos) << reference;
  const std::string behaviour = message({.kind = kReinforce, .importance_weights = ImportanceWeights::kMask});
  EXPECT_NE(behaviour.find("expects `logprobs`"), std::string::npos) << behaviour;
}

TEST(ObjectiveOptionsTest, ThatHaveNoEffectAreRefused) {
  const auto refused = [](const ObjectiveOptions& options, const std::string& flag) {
    const std::string message = message_of<InputError>([&] { check_objective_options(options); });
    EXPECT_EQ(message.find("--" + flag), 0u) << message;
  };
  refused({.kind = kSft, .kl_coef = 0.1}, "kl-coef");
  refused({.kind = kSft, .importance_weights = ImportanceWeights::kMask}, "importance-weights");
  refused({.kind = kCispo, .dual_clip = 9}, "dual-clip");
  refused({.kind = kGrpo, .dual_clip = 1.1}, "dual-clip");
  refused({.kind = kGrpo, .baseline = Baseline::kRunning}, "scale-rewards");
  refused({.kind = kGrpo, .importance_cap = 0.5}, "importance-cap");
  refused({.kind = kGrpo, .turn_discount = 1.5}, "turn-discount");
}

TEST(ObjectiveOptionsTest, DefaultsAreValid) {
  for (const std::string& name : objective_names()) {
    const ObjectiveOptions options = objective_named(name);
    EXPECT_NO_THROW(check_objective_options(options)) << name;
    EXPECT_EQ(make_objective(options)->name(), name);
  }
}

}  // namespace
}  // namespace espalier::testing
