// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/distributions.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "espalier/verify/causal_sequence.h"
#include "tests/engine/random_steps.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int64_t kNumIds = 19;
constexpr double kTolerance = 1e-12;

/// log softmax(logits / temperature) of what follows each token of a sequence on its own, [T, V] float64.
at::Tensor plain_distributions(const Decoder& decoder, std::span<const int32_t> tokens, double temperature) {
  const at::NoGradGuard no_grad;
  const auto size = static_cast<int64_t>(tokens.size());
  const std::vector<int64_t> wide(tokens.begin(), tokens.end());
  const at::Tensor hidden =
      decoder.forward(at::tensor(wide, at::kLong), at::arange(size), CausalSequence(size));
  return at::log_softmax(hidden.mm(decoder.lm_head().weight.t()) / temperature, 1);
}

double difference(double a, double b) {
  return std::abs(a - b) / std::max(1.0, std::abs(b));
}

class DistributionsOfFamily : public ::testing::TestWithParam<Family> {};

TEST_P(DistributionsOfFamily, AreThoseOfEachTrajectoryAlone) {
  constexpr int kForests = 8;
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kNumIds), 77);
  for (int i = 0; i < kForests; ++i) {
    Rng rng(test_seed(i), 0xD15);
    const auto shape = static_cast<Shape>(rng.below(kNumShapes));
    const Trajectories rows = random_trajectories(rng, shape, {.vocab_size = kNumIds});
    const DistributionOptions options{.temperature = rng.below(2) == 0 ? 1 : 0.7,
                                      .entropies = rng.below(3) > 0,
                                      .top_k = rng.below(4) == 0 ? 0 : rng.between(1, kNumIds)};
    SCOPED_TRACE(::testing::Message() << to_string(GetParam()) << " seed " << i << ": temperature "
                                      << options.temperature << ", top-k " << options.top_k);
    const Step step = make_step(rows, {.plan = random_plan(rng, rows), .terms = TermChoice::kAll});
    const TokenDistributions found = compute_distributions(decoder, rows, step, options);
    ASSERT_EQ(found.entropies.empty(), !options.entropies);
    ASSERT_EQ(found.top_row.empty(), options.top_k == 0);
    for (int64_t row = 0; row < rows.num_rows(); ++row) {
      EXPECT_EQ(found.logprobs[rows.offsets[row]], 0);
      const at::Tensor plain = plain_distributions(decoder, rows.row(row), options.temperature);
      const at::Tensor entropies = -(plain.exp() * plain).sum(1);
      const auto [sorted, order] = plain.sort(/*stable=*/true, 1, /*descending=*/true);
      for (int64_t t = 1; t < rows.row_size(row); ++t) {
        const int64_t at = rows.offsets[row] + t;
        EXPECT_LT(difference(found.logprobs[at], plain[t - 1][rows.row(row)[t]].item<double>()), kTolerance);
        if (options.entropies) {
          EXPECT_LT(difference(found.entropies[at], entropies[t - 1].item<double>()), kTolerance);
        }
        if (options.top_k == 0) continue;
        const at::Tensor ids = found.top_ids[found.top_row[at]];
        EXPECT_TRUE(ids.equal(order[t - 1].narrow(0, 0, options.top_k)));
        const at::Tensor errors =
            found.top_logprobs[found.top_row[at]] - sorted[t - 1].narrow(0, 0, options.top_k);
        EXPECT_LT(errors.abs().max().item<double>(), 100 * kTolerance);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, DistributionsOfFamily, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return to_string(info.param); });

// Trajectories that are all the same have the rows of one.
TEST(Distributions, OfASharedTokenAreComputedOnce) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, kNumIds), 5);
  const Trajectories rows = from_rows({{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 5}, {1, 2, 3, 4}});
  const Step step = make_step(rows, {.terms = TermChoice::kAll});
  const TokenDistributions found = compute_distributions(decoder, rows, step, {.top_k = 2});
  EXPECT_EQ(found.top_ids.size(0), 3);
  const std::unordered_set<int64_t> last{found.top_row[3], found.top_row[7], found.top_row[11]};
  EXPECT_EQ(last.size(), 1);
}

}  // namespace
}  // namespace espalier::testing
