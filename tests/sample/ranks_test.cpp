// SPDX-License-Identifier: Apache-2.0
// Log-probabilities, distributions and completions that several ranks compute, against those of one process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "espalier/engine/logprob_pass.h"
#include "espalier/sample/distributions.h"
#include "espalier/sample/sampler.h"
#include "tests/distributed/thread_ranks.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int64_t kWords = 19;
constexpr int kForests = 6;
constexpr int64_t kMostRanks = 4;

template <class Body>
void on_ranks(int64_t ranks, const Body& body) {
  for (const std::string& error : ThreadRanks(ranks).run(body)) EXPECT_EQ(error, "");
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

class RanksOfFamily : public ::testing::TestWithParam<Family> {};

TEST_P(RanksOfFamily, ComputeTheBitsOfOneProcess) {
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kWords), 77);
  int64_t encoded = 0, encoded_by_all = 0, most_of_a_rank = 0;
  for (int i = 0; i < kForests; ++i) {
    Rng rng(test_seed(i), 0x4A5);
    const Trajectories rows = random_trajectories(rng, Shape::kMixed, {.vocab_size = kWords, .draws = 3});
    int64_t longest = 0;
    for (int64_t row = 0; row < rows.num_rows(); ++row) longest = std::max(longest, rows.row_size(row));
    const DistributionOptions options{.entropies = i % 2 == 0, .top_k = i % 3};
    const PlanOptions plan =
        i % 2 == 0 ? PlanOptions{Strategy::kPartition, 5} : PlanOptions{Strategy::kTreePacking, longest + i};
    const Step step = make_step(rows, {.plan = plan, .terms = TermChoice::kAll});
    const int64_t ranks = rng.between(2, kMostRanks);
    SCOPED_TRACE(::testing::Message() << to_string(GetParam()) << " seed " << i << ", " << ranks << " ranks");
    std::vector<double> expected(rows.num_tokens());
    compute_logprobs(decoder, rows, step, &expected);
    const TokenDistributions one = compute_distributions(decoder, rows, step, options);
    on_ranks(ranks, [&](const Group& group) {
      std::vector<double> logprobs(rows.num_tokens());
      compute_logprobs(decoder, rows, step, &logprobs, {}, group);
      EXPECT_TRUE(same_bits(logprobs, expected));
      const TokenDistributions found = compute_distributions(decoder, rows, step, options, {}, group);
      EXPECT_TRUE(same_bits(found.logprobs, one.logprobs));
      EXPECT_TRUE(same_bits(found.entropies, one.entropies));
      ASSERT_EQ(found.top_row.size(), one.top_row.size());
      EXPECT_EQ(found.top_ids.sizes(), one.top_ids.sizes());
      for (size_t token = 0; token < one.top_row.size(); ++token) {
        const int64_t row = found.top_row[token], its = one.top_row[token];
        ASSERT_EQ(row < 0, its < 0);
        if (row < 0) continue;
        EXPECT_TRUE(found.top_ids[row].equal(one.top_ids[its]));
        EXPECT_TRUE(found.top_logprobs[row].equal(one.top_logprobs[its]));
      }
    });
    int64_t done = 0, most = 0;
    const std::vector<bool> all = micro_batches_with_loss(step);
    on_ranks(ranks, [&](const Group& group) {
      const std::vector<bool> own = part_of_rank(step, all, group);
      const std::vector<std::string> counts = group.gather(std::to_string(std::ranges::count(own, true)));
      if (group.is_first()) {
        for (const std::string& count : counts) done += std::stoll(count);
        for (const std::string& count : counts) most = std::max<int64_t>(most, std::stoll(count));
      }
    });
    most_of_a_rank += most;
    encoded += std::ranges::count(all, true);
    encoded_by_all += done;
  }
  EXPECT_EQ(encoded, encoded_by_all);  // nothing twice
  EXPECT_LT(most_of_a_rank, encoded);
}

TEST_P(RanksOfFamily, SampleTheTokensOfOneProcess) {
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kWords), 31);
  for (int i = 0; i < kForests; ++i) {
    Rng rng(test_seed(i), 0x4A6);
    const Trajectories prompts = prompts_of(random_trajectories(
        rng, static_cast<Shape>(rng.below(kNumShapes)), {.vocab_size = kWords, .max_length = 20}));
    const SampleOptions options{.samples = rng.between(1, 3),
                                .max_new_tokens = 8,
                                .stop_ids = {3},
                                .seed = static_cast<uint64_t>(i),
                                .batch_size = rng.between(1, 9)};
    const int64_t ranks = i == 0 ? prompts.num_rows() + 1 : rng.between(2, kMostRanks);
    SCOPED_TRACE(::testing::Message() << to_string(GetParam()) << " seed " << i << ", " << ranks << " ranks");
    const SampleResult one = sample(decoder, prompts, options);
    std::vector<SampleResult> found(ranks);
    on_ranks(ranks, [&](const Group& group) {
      found[group.rank()] = sample(decoder, prompts, options, {}, {}, group);
    });
    for (const SampleResult& result : found) {
      EXPECT_EQ(result.sampled_tokens, one.sampled_tokens);
      EXPECT_EQ(result.flat_prompt_tokens, one.flat_prompt_tokens);
      ASSERT_EQ(result.completions.size(), one.completions.size());
      for (size_t c = 0; c < one.completions.size(); ++c) {
        const Completion &a = result.completions[c], &b = one.completions[c];
        EXPECT_EQ(std::tuple(a.row, a.sample, a.tokens, a.stopped),
                  std::tuple(b.row, b.sample, b.tokens, b.stopped));
        EXPECT_TRUE(same_bits(a.logprobs, found[0].completions[c].logprobs));
        for (size_t t = 0; t < b.logprobs.size(); ++t) EXPECT_NEAR(a.logprobs[t], b.logprobs[t], 1e-12);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RanksOfFamily, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return to_string(info.param); });

TEST(Ranks, WithOtherRowsAreFound) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, kWords), 5);
  const Trajectories rows[] = {from_rows({{1, 2, 3}, {1, 2, 4}}), from_rows({{1, 2, 4}, {1, 2, 3}})};
  const auto thrown = ThreadRanks(2).run([&](const Group& group) {
    const Step step = make_step(rows[group.rank()], {.terms = TermChoice::kAll});
    std::vector<double> logprobs(6);
    compute_logprobs(decoder, rows[group.rank()], step, &logprobs, {}, group);
  });
  const auto sampled =
      ThreadRanks(2).run([&](const Group& group) { sample(decoder, rows[group.rank()], {}, {}, {}, group); });
  const auto seeds = ThreadRanks(2).run([&](const Group& group) {
    sample(decoder, rows[0], {.seed = static_cast<uint64_t>(group.rank())}, {}, {}, group);
  });
  const auto seeds_of_rows = ThreadRanks(2).run([&](const Group& group) {
    const SampleOptions own{.seed = static_cast<uint64_t>(group.rank())};
    sample(decoder, rows[0], {.rows = {{}, own}}, {}, {}, group);
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_NE(seeds_of_rows[rank].find("seed 0, 0, 1"), std::string::npos) << seeds_of_rows[rank];
    EXPECT_NE(thrown[rank].find("the rows and their plan: expected the same"), std::string::npos);
    EXPECT_NE(sampled[rank].find("prompts and seed: expected the same"), std::string::npos);
    EXPECT_NE(seeds[rank].find("seed 1"), std::string::npos) << seeds[rank];
  }
}

}  // namespace
}  // namespace espalier::testing
