// SPDX-License-Identifier: Apache-2.0
// Objectives where a probability is 0 or 1, or rounds to it.
#include <c10/util/BFloat16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/objective/evaluate.h"

namespace espalier::testing {
namespace {

using enum ObjectiveKind;

constexpr long double kLeastRestInFloat = 0x1p-25L;  // of Orpo
// Log-probabilities: of certain answers, as rounding leaves them (also above 0), and of others that are not.
constexpr double kCertain[] = {0, -1e-300, -1e-30, -1e-17, -1e-8, -0x1p-24, -5.9e-8, 1e-9, 9e-4};
constexpr double kOthers[] = {-1e-6, -1e-4, -0.01, -1, -30, -800, -1e4};

std::vector<double> all_logprobs() {
  std::vector<double> all(std::begin(kCertain), std::end(kCertain));
  all.insert(all.end(), std::begin(kOthers), std::end(kOthers));
  return all;
}

double rounded_to_bfloat16(double value) {
  return static_cast<double>(static_cast<float>(c10::BFloat16(static_cast<float>(value))));
}

// A chosen and a rejected trajectory of one token each.
std::vector<Policy> pair_of(double chosen, double rejected) {
  return {{.logprob = chosen, .coefficient = 0.5, .trajectory = 0, .chosen = 1},
          {.logprob = rejected, .coefficient = 0.5, .trajectory = 1, .chosen = 0}};
}

struct ByOdds {
  long double loss, chosen_slope, rejected_slope;
};

// By the odds themselves, which long double holds where float64 does not:
// l = -C + beta log(1 + odds(R) / odds(C)).
ByOdds orpo_by_odds(long double beta, double chosen, double rejected) {
  const long double c = std::min(chosen, 0.0), r = std::min(rejected, 0.0);
  const long double rest = -std::expm1(r);
  const bool is_guarded = rest < kLeastRestInFloat;
  const long double in_place = is_guarded ? kLeastRestInFloat * std::exp(rest / kLeastRestInFloat - 1) : rest;
  const long double ratio = std::exp(r - c) * -std::expm1(c) / in_place;
  const long double rest_slope =
      -std::exp(r) / (is_guarded ? kLeastRestInFloat : rest);  // of log(in_place) in r
  return {-static_cast<long double>(chosen) + beta * std::log1p(ratio),
          -1 - beta * std::exp(r - c) / in_place / (1 + ratio),
          beta * ratio / (1 + ratio) * (1 - rest_slope)};
}

void expect_relative(double received, long double expected, const char* what) {
  EXPECT_TRUE(std::isfinite(received)) << what;
  EXPECT_NEAR(received, static_cast<double>(expected), 1e-12 * static_cast<double>(std::abs(expected)))
      << what;
}

TEST(Certain, OrpoIsFiniteAndExactForBothAnswers) {
  const ObjectiveOptions options{.kind = kOrpo, .normalize = Normalize::kSequenceSum, .beta = 0.4};
  for (const double chosen : all_logprobs()) {
    for (const double rejected : all_logprobs()) {
      for (const auto round : {+[](double value) { return value; },
                               +[](double value) { return static_cast<double>(static_cast<float>(value)); },
                               &rounded_to_bfloat16}) {
        const double c = round(chosen), r = round(rejected);
        SCOPED_TRACE(::testing::Message() << "chosen " << c << " rejected " << r);
        // The plain form subtracts numbers of the size of 1 / b.
        const Result result = (r < -0.005 ? evaluate : evaluate_alone)(options, pair_of(c, r));
        const ByOdds expected = orpo_by_odds(0.4L, c, r);
        EXPECT_NEAR(result.loss(), static_cast<double>(expected.loss),
                    1e-13 * (1 + std::abs(static_cast<double>(expected.loss))));
        expect_relative(result.gradient[0], expected.chosen_slope, "chosen");
        expect_relative(result.gradient[1], expected.rejected_slope, "rejected");
      }
    }
  }
}

TEST(Certain, OrpoTendsToTheOddsOfTheRejectedAnswer) {
  const ObjectiveOptions options{.kind = kOrpo, .normalize = Normalize::kSequenceSum, .beta = 0.4};
  const double odds = std::exp(-0.7) / -std::expm1(-0.7);
  const Result certain = evaluate(options, pair_of(0, -0.7)),
               almost = evaluate(options, pair_of(-1e-9, -0.7));
  EXPECT_NEAR(certain.loss(), 0, 1e-15);
  EXPECT_NEAR(certain.gradient[0], -1 - 0.4 * odds, 1e-15);
  EXPECT_EQ(certain.gradient[1], 0);
  EXPECT_NEAR(almost.gradient[0], certain.gradient[0], 1e-8);
  // Negative control: the formula with logarithms of 0.
  const double log_odds_ratio = (0 - -0.7) - (std::log(-std::expm1(0.0)) - std::log(-std::expm1(-0.7)));
  EXPECT_FALSE(std::isfinite(-1 / (1 + std::exp(log_odds_ratio)) / -std::expm1(0.0)));
}

// What its loss gains where the rejected answer becomes more certain still goes on without a jump or a bend.
TEST(Certain, OrpoGoesOnAlongTheTangent) {
  const ObjectiveOptions options{.kind = kOrpo, .normalize = Normalize::kSequenceSum, .beta = 0.4};
  double before = 0;
  for (const double scale : {4.0, 2.0, 1.0, 0.5, 0.25, 0.0}) {
    const double rejected = -scale * 0x1p-25;
    const double loss = evaluate_alone(options, pair_of(-1, rejected)).loss();
    EXPECT_GT(loss, before);
    before = loss;
  }
  const Result above = evaluate_alone(options, pair_of(-1, -0x1.000001p-25));
  const Result below = evaluate_alone(options, pair_of(-1, -0x0.fffffep-25));
  EXPECT_NEAR(above.loss(), below.loss(), 1e-6);
  EXPECT_NEAR(above.gradient[1] / below.gradient[1], 1, 1e-6);
}

// Fresh samples and references that are just as certain, in every objective.
TEST(Certain, EveryObjectiveIsFinite) {
  for (const ObjectiveKind kind : {kSft, kPpo, kGrpo, kDrGrpo, kDapo, kGspo, kCispo, kReinforce, kOpd, kDpo,
                                   kIpo, kKto, kSimpo, kOrpo}) {
    SCOPED_TRACE(to_string(kind));
    for (const double first : all_logprobs()) {
      for (const double second : all_logprobs()) {
        for (const bool is_bfloat16 : {false, true}) {
          std::vector<Policy> terms = pair_of(first, second);
          for (Policy& term : terms) {
            if (is_bfloat16) term.logprob = rounded_to_bfloat16(term.logprob);
            term.old_logprob = term.logprob;
            term.has_old = true;
            term.advantage = term.chosen == 1 ? 2 : -1;
          }
          terms[0].ref_logprob = terms[1].logprob;
          terms[1].ref_logprob = terms[0].logprob;
          SCOPED_TRACE(::testing::Message() << terms[0].logprob << " and " << terms[1].logprob);
          const Result result = (kind == kOrpo ? evaluate_alone : evaluate)(default_options(kind), terms);
          EXPECT_TRUE(std::isfinite(result.loss()));
          for (const double gradient : result.gradient) EXPECT_TRUE(std::isfinite(gradient));
          for (const at::Tensor& metric : result.value.metrics) {
            EXPECT_TRUE(std::isfinite(metric.to(at::kDouble).item<double>()));
          }
        }
      }
    }
  }
}

// The behaviour policy was certain of a token that this one finds impossible, and the reverse with a reward.
TEST(Certain, ClippedRatiosAreFinite) {
  for (const ObjectiveKind kind : {kPpo, kGrpo, kDrGrpo, kDapo, kGspo, kCispo, kReinforce}) {
    SCOPED_TRACE(to_string(kind));
    for (const auto& [now, before, advantage] :
         {std::tuple(-1e4, 0.0, 2.0), {-1e4, 0.0, -2.0}, {0.0, -1e4, 2.0}, {0.0, -700.0, 2.0}}) {
      const Result result = evaluate_alone(default_options(kind), {{now, advantage, before, true, 0.5}});
      EXPECT_TRUE(std::isfinite(result.loss()));
      EXPECT_TRUE(std::isfinite(result.gradient[0]));
    }
  }
}

}  // namespace
}  // namespace espalier::testing
