// SPDX-License-Identifier: Apache-2.0
// Ratios and divergences whose exponentials lie beyond float64.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "espalier/objective/exponentials.h"
#include "espalier/objective/policy_gradient.h"
#include "tests/objective/evaluate.h"

namespace espalier::testing {
namespace {

using enum ObjectiveKind;

constexpr double kLargest = std::numeric_limits<double>::max();
constexpr double kBehaviour[] = {-720, -1500, -1e10, -1e308, -kLargest};  // log-probabilities

void expect_relative(double received, long double exact) {
  EXPECT_NEAR(received / static_cast<double>(exact), 1, 1e-14) << received;
}

TEST(LargeRatios, ClippedTermsHaveNoGradient) {
  for (const ObjectiveKind kind : {kPpo, kGrpo, kDrGrpo, kDapo, kGspo}) {
    const ObjectiveOptions options = default_options(kind);
    SCOPED_TRACE(to_string(kind));
    for (const double behaviour : kBehaviour) {
      const Result result = evaluate(options, {{-1, 2, behaviour, true, 0.5}});
      EXPECT_NEAR(result.loss(), -0.5 * (1 + options.clip_high) * 2, 1e-15);
      EXPECT_EQ(result.gradient[0], 0);
      EXPECT_EQ(result.metric("clip_fraction"), 1);
    }
  }
}

TEST(LargeRatios, LeaveOtherTermsAsTheyAre) {
  for (const ObjectiveKind kind : {kPpo, kGrpo, kDrGrpo, kDapo, kGspo}) {
    const ObjectiveOptions options = default_options(kind);
    SCOPED_TRACE(to_string(kind));
    const Policy inside{-1, 2, -1.0001, true, 0.25, -1, 0}, below{-2, -1, -1, true, 0.25, -1, 1};
    const Result alone = evaluate(options, {inside, below});
    for (const double behaviour : kBehaviour) {
      const Result result = evaluate(options, {inside, below, {-1, 2, behaviour, true, 0.5, -1, 2}});
      EXPECT_EQ(result.gradient[0], alone.gradient[0]);
      EXPECT_EQ(result.gradient[1], alone.gradient[1]);
      EXPECT_NE(result.gradient[0], 0);
      EXPECT_EQ(result.gradient[2], 0);
      EXPECT_NEAR(result.loss(), alone.loss() - 0.5 * (1 + options.clip_high) * 2, 1e-15);
    }
  }
}

TEST(LargeRatios, OfOneTrajectoryAreClippedTogether) {
  // Their mean overflows nowhere, though the sum of the log-ratios does.
  const Result result = evaluate_alone(default_options(kGspo), {{-1, 2, -kLargest, true, 4, -1, 0},
                                                                {-1, 2, -kLargest, true, 4, -1, 0},
                                                                {-1, 0, -kLargest, true, 4, -1, 0}});
  EXPECT_TRUE(std::isfinite(result.loss()));
  for (const double gradient : result.gradient) EXPECT_EQ(gradient, 0);
}

TEST(LargeRatios, DualClipBoundsNegativeAdvantages) {
  const ObjectiveOptions options{.kind = kGrpo, .dual_clip = 3};
  for (const double behaviour : kBehaviour) {
    const Result result = evaluate(options, {{-1, -2, behaviour, true, 0.5}});
    EXPECT_EQ(result.loss(), 0.5 * 3 * 2);
    EXPECT_EQ(result.gradient[0], 0);
  }
}

TEST(LargeRatios, WithoutAdvantageAreNothing) {
  for (const ObjectiveKind kind : {kGrpo, kGspo}) {
    for (const double behaviour : kBehaviour) {
      const Result result = evaluate(default_options(kind), {{-1, 0, behaviour, true, 0.5}});
      EXPECT_EQ(result.loss(), 0);
      EXPECT_EQ(result.gradient[0], 0);
      EXPECT_EQ(result.metric("clip_fraction"), 0);
    }
  }
}

TEST(LargeRatios, AreClippedWeights) {
  const ObjectiveOptions options = default_options(kCispo);
  for (const double behaviour : kBehaviour) {
    const Result result = evaluate(options, {{-1, 2, behaviour, true, 0.5}});
    EXPECT_NEAR(result.gradient[0], -0.5 * (1 + options.clip_high) * 2, 1e-14);
    EXPECT_NEAR(result.loss(), 0.5 * (1 + options.clip_high) * 2, 1e-14);
  }
}

TEST(LargeRatios, AreTruncatedOrMaskedImportance) {
  for (const ObjectiveKind kind : {kReinforce, kGrpo, kGspo, kCispo}) {
    for (const ImportanceLevel level : {ImportanceLevel::kToken, ImportanceLevel::kSequence}) {
      ObjectiveOptions options = default_options(kind);
      options.importance_level = level;
      for (const double behaviour : kBehaviour) {
        const std::vector<Policy> terms{{-1, -2, behaviour, true, 0.5}};
        options.importance_weights = ImportanceWeights::kTruncate;
        EXPECT_NEAR(evaluate(options, terms).gradient[0], 2 * 0.5 * 2, 1e-15);
        options.importance_weights = ImportanceWeights::kMask;
        const Result masked = evaluate(options, terms);
        EXPECT_EQ(masked.gradient[0], 0);
        EXPECT_EQ(masked.loss(), 0);
      }
    }
  }
}

// The ratio e^719 is above float64; its product with a small advantage is not.
TEST(LargeRatios, ProductsWithSmallFactorsAreExact) {
  const long double exact = 0.5L * 1e-20L * std::exp(719.0L);
  for (const ObjectiveKind kind : {kGrpo, kGspo}) {
    const Result result = evaluate_alone(default_options(kind), {{-1, -1e-20, -720, true, 0.5}});
    expect_relative(result.loss(), exact);
    expect_relative(result.gradient[0], exact);
  }
  const Result distilled = evaluate_alone({.kind = kOpd}, {{-1, 0, -720, true, 0.5, -1.25}});
  EXPECT_FALSE(std::isfinite(distilled.loss()));
  const Result slightly = evaluate_alone({.kind = kOpd}, {{-1, 0, -720, true, 1e-20, -1.25}});
  expect_relative(slightly.loss(), 0.25L * 1e-20L * std::exp(719.0L));
  expect_relative(slightly.gradient[0], 0.25L * 1e-20L * std::exp(719.0L));
  EXPECT_EQ(evaluate_alone({.kind = kOpd}, {{-1, 0, -720, true, 0.5, -1}}).gradient[0], 0);
}

TEST(LargeRatios, ThatNothingClipsAreNotFinite) {
  for (const ObjectiveKind kind : {kGrpo, kGspo}) {
    const Result result = evaluate_alone(default_options(kind), {{-1, -2, -720, true, 0.5}});
    EXPECT_FALSE(std::isfinite(result.loss()));
  }
}

TEST(LargeDivergences, AreExactWhereTheLossIsFinite) {
  // log p - log p_ref is -719: the estimate k3 is above float64, and a small coefficient of it is not.
  const auto divergence = [](KlEstimator estimator, double coefficient, double logprob, double reference) {
    const ObjectiveOptions options{.kind = kGrpo, .kl_coef = 0.5, .kl_estimator = estimator};
    return evaluate_alone(options, {{logprob, 0, 0, false, coefficient, reference}});
  };
  const Result k3 = divergence(KlEstimator::kK3, 1e-10, -720, -1);
  expect_relative(k3.loss(), 0.5e-10L * (std::exp(719.0L) - 720));
  expect_relative(k3.gradient[0], 0.5e-10L * (1 - std::exp(719.0L)));
  const Result k2 = divergence(KlEstimator::kK2, 1e-10, -1.6e154, -1);
  expect_relative(k2.loss(), 0.5e-10L * 1.6e154L * 1.6e154L / 2);
  expect_relative(k2.gradient[0], -0.5e-10L * 1.6e154L);
  const Result k1 = divergence(KlEstimator::kK1, 1e-10, -720, -1);
  expect_relative(k1.loss(), 0.5e-10L * -719);
  // The reference is far less likely: k3 grows with the log-ratio alone.
  for (const double reference : {-720.0, -1e10, -1e308}) {
    const Result below = divergence(KlEstimator::kK3, 1, -1, reference);
    expect_relative(below.loss(), 0.5L * (-1 - static_cast<long double>(reference) - 1));
    EXPECT_EQ(below.gradient[0], 0.5);
  }
  EXPECT_FALSE(std::isfinite(divergence(KlEstimator::kK3, 1, -720, -1).loss()));
}

TEST(LargeDivergences, OfRewardsAreExactToo) {
  expect_relative(kl_estimate(-719, KlEstimator::kK3, 1e-10), 1e-10L * (std::exp(719.0L) - 720));
  expect_relative(kl_estimate(719, KlEstimator::kK3, 0.5), 0.5L * 718);
  expect_relative(kl_estimate(1.6e154, KlEstimator::kK2, 0.5), 0.5L * 1.6e154L * 1.6e154L / 2);
  EXPECT_EQ(kl_estimate(-719, KlEstimator::kK1, 0.5), -359.5);
}

}  // namespace
}  // namespace espalier::testing
