// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/token_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

std::vector<double> random_logits(Rng& rng, int64_t size) {
  std::vector<double> logits(size);
  // Some are equal.
  for (double& logit : logits) logit = rng.below(4) == 0 ? rng.between(-2, 2) : 2 * rng.normal();
  return logits;
}

/// The distribution that tokens are drawn from, in the plainest way: softmax, the top_k first of a full sort,
/// of these as many as it takes to reach top_p.
std::vector<double> plain_distribution(const std::vector<double>& logits, const TokenChoiceOptions& options) {
  std::vector<double> scores = logits;
  for (double& score : scores) score = std::exp(score / options.temperature);
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(order.size())) order.resize(options.top_k);
  double all = 0;
  for (const int token : order) all += scores[token];
  std::vector<double> kept(scores.size(), 0.0);
  double sum = 0;
  for (const int token : order) {
    kept[token] = scores[token] / all;
    sum += kept[token];
    if (sum >= options.top_p - 1e-12) break;
  }
  for (double& probability : kept) probability /= sum;
  return kept;
}

double logprob_of(const std::vector<double>& logits, int32_t token, double temperature) {
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit / temperature);
  return logits[token] / temperature - std::log(sum);
}

TokenChoiceOptions random_options(Rng& rng, int64_t size) {
  constexpr double kTemperatures[] = {0.3, 1, 1.7}, kTopP[] = {0.05, 0.5, 0.9, 0.999, 1};
  return {.temperature = kTemperatures[rng.below(3)],
          .top_k = rng.below(2) == 0 ? 0 : rng.between(1, size + 2),
          .top_p = kTopP[rng.below(5)]};
}

// Every number on a fine grid of uniform ones is drawn once: a token comes up as often as its probability
// says, to within one.
TEST(TokenChoice, UniformNumbersGiveThePlainDistribution) {
  Rng rng(test_seed(1), 0x70C);
  constexpr int64_t kGrid = 4000;
  for (int i = 0; i < 60; ++i) {
    const int64_t size = i % 3 == 0 ? rng.between(200, 600) : rng.between(1, 40);
    const std::vector<double> logits = random_logits(rng, size);
    const TokenChoiceOptions options = random_options(rng, size);
    SCOPED_TRACE(::testing::Message()
                 << "case " << i << ": " << size << " logits, temperature " << options.temperature
                 << " top-k " << options.top_k << " top-p " << options.top_p);
    TokenChooser chooser(options);
    const std::vector<double> expected = plain_distribution(logits, options);
    std::vector<double> drawn(logits.size(), 0.0);
    for (int64_t n = 0; n < kGrid; ++n) {
      const TokenChoice choice = chooser.choose<double>(logits, (n + 0.5) / kGrid);
      drawn[choice.token] += 1;
      ASSERT_NEAR(choice.logprob, logprob_of(logits, choice.token, options.temperature), 1e-12);
    }
    const auto likely = std::ranges::max_element(expected) - expected.begin();
    // Among the tokens that are left the most likely one has the log-probability that is higher by it.
    const TokenChoice first = chooser.choose<double>(logits, 0);
    ASSERT_NEAR(
        first.truncation,
        std::log(expected[likely]) - logprob_of(logits, static_cast<int32_t>(likely), options.temperature),
        1e-12);
    for (size_t token = 0; token < logits.size(); ++token) {
      ASSERT_NEAR(drawn[token], expected[token] * kGrid, 1.001) << "token " << token;
      ASSERT_TRUE(expected[token] > 0 || drawn[token] == 0) << "token " << token;
    }
  }
}

// With the sampler's own random numbers. The bound is that of a probability of 1e-9.
TEST(TokenChoice, ChiSquareOfRandomDraws) {
  Rng rng(test_seed(2), 0x70C);
  constexpr int64_t kTokens = 20, kDraws = 200'000;
  const std::vector<double> logits = random_logits(rng, kTokens);
  const TokenChoiceOptions options{.temperature = 1.3, .top_k = 15, .top_p = 0.95};
  const std::vector<double> expected = plain_distribution(logits, options);
  TokenChooser chooser(options);
  std::vector<double> drawn(kTokens, 0.0);
  for (int64_t n = 0; n < kDraws; ++n) drawn[chooser.choose<double>(logits, rng.uniform()).token] += 1;
  const auto chi_square = [&](const std::vector<double>& probabilities) {
    double sum = 0;
    for (int64_t token = 0; token < kTokens; ++token) {
      const double mean = probabilities[token] * kDraws;
      if (mean > 0) sum += (drawn[token] - mean) * (drawn[token] - mean) / mean;
    }
    return sum;
  };
  const auto degrees = std::ranges::count_if(expected, [](double p) { return p > 0; }) - 1;
  ASSERT_GE(degrees, 1);
  EXPECT_LT(chi_square(expected), degrees + 6.1 * std::sqrt(2.0 * degrees) + 40);
  // Control: the distribution of a temperature that is a little off.
  EXPECT_GT(chi_square(plain_distribution(logits, {.temperature = 1.4, .top_k = 15, .top_p = 0.95})), 150);
}

TEST(TokenChoice, GreedyTakesTheFirstOfTheMostLikely) {
  TokenChooser chooser({.temperature = 0, .top_k = 3, .top_p = 0.5});
  const std::vector<float> logits = {1, 4, 4, -2};
  const TokenChoice choice = chooser.choose<float>(logits, 0.99);
  EXPECT_EQ(choice.token, 1);
  EXPECT_NEAR(choice.logprob, logprob_of({1, 4, 4, -2}, 1, 1), 1e-12);
  EXPECT_NEAR(choice.truncation, -choice.logprob, 1e-12);
}

TEST(TokenChoice, TokensWithoutProbabilityAreNeverDrawn) {
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  TokenChooser chooser({});
  for (const double uniform : {0.0, 0.5, 1 - 0x1p-53}) {
    EXPECT_EQ(chooser.choose<double>(std::vector{kNever, 0.0, kNever}, uniform).token, 1);
  }
}

TEST(TokenChoice, BadLogitsAndOptionsAreErrors) {
  TokenChooser chooser({});
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               infinite = std::numeric_limits<double>::infinity();
  EXPECT_THROW(chooser.choose<double>(std::vector{0.0, nan}, 0.5), InputError);
  EXPECT_THROW(chooser.choose<double>(std::vector{nan, 0.0}, 0.5), InputError);
  EXPECT_THROW(chooser.choose<double>(std::vector{0.0, infinite}, 0.5), InputError);
  EXPECT_THROW(chooser.choose<double>(std::vector{-infinite, -infinite}, 0.5), InputError);
  EXPECT_THROW(TokenChooser({.temperature = -1}), InputError);
  EXPECT_THROW(TokenChooser({.temperature = infinite}), InputError);
  EXPECT_THROW(TokenChooser({.top_k = -1}), InputError);
  EXPECT_THROW(TokenChooser({.top_p = 0}), InputError);
  EXPECT_THROW(TokenChooser({.top_p = 1.5}), InputError);
}

}  // namespace
}  // namespace espalier::testing
