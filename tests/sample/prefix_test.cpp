// SPDX-License-Identifier: Apache-2.0
// Prefixes that are kept between calls, and prompts that join while others are sampled.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "espalier/sample/sampler.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int64_t kTokens = 19;
constexpr double kExact = 1e-12;
constexpr int64_t kLarge = int64_t{1} << 30;

using Tokens = std::vector<int32_t>;

void append_random(Rng& rng, int64_t count, Tokens* tokens) {
  for (int64_t i = 0; i < count; ++i) tokens->push_back(static_cast<int32_t>(rng.below(kTokens)));
}

/// A prompt that begins like others: whole, or cut anywhere, and with something more or not.
Tokens next_prompt(Rng& rng, const std::vector<Tokens>& known) {
  Tokens prompt;
  if (!known.empty() && rng.below(6) > 0) prompt = known[rng.below(static_cast<int64_t>(known.size()))];
  if (!prompt.empty() && rng.below(3) == 0)
    prompt.resize(rng.between(1, static_cast<int64_t>(prompt.size())));
  if (prompt.size() > 40) prompt.resize(20);
  append_random(rng, prompt.empty() ? rng.between(1, 9) : rng.below(5), &prompt);
  return prompt;
}

SamplingMemory memory_of(const Decoder& decoder, int64_t budget) {
  return {.tree = std::make_shared<PrefixTree>(decoder.config(), budget)};
}

/// Largest difference of log-probabilities of completions that have to be the same.
double difference(const std::vector<Completion>& found, const std::vector<Completion>& expected) {
  double worst = 0;
  EXPECT_EQ(found.size(), expected.size());
  for (size_t c = 0; c < std::min(found.size(), expected.size()); ++c) {
    EXPECT_EQ(std::tuple(found[c].row, found[c].sample, found[c].tokens, found[c].stopped),
              std::tuple(expected[c].row, expected[c].sample, expected[c].tokens, expected[c].stopped));
    if (found[c].tokens != expected[c].tokens) return INFINITY;
    for (size_t t = 0; t < found[c].logprobs.size(); ++t) {
      worst = std::max(worst, std::abs(found[c].logprobs[t] - expected[c].logprobs[t]));
    }
  }
  return worst;
}

Tokens continued(const Trajectories& prompts, const Completion& completion) {
  const auto prompt = prompts.row(completion.row);
  Tokens tokens(prompt.begin(), prompt.end());
  tokens.insert(tokens.end(), completion.tokens.begin(), completion.tokens.end());
  return tokens;
}

class PrefixesOfFamily : public ::testing::TestWithParam<Family> {};

// Trees of conversations, with prompts that are repeated, cut and continued; under any budget.
TEST_P(PrefixesOfFamily, ChangeNothingButWhatIsEncoded) {
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kTokens), 31);
  double worst = 0;
  int64_t kept = 0, evicted = 0;
  for (int i = 0; i < 8; ++i) {
    Rng rng(test_seed(i), 0x9F1);
    const int64_t budget = i % 2 == 0 ? kLarge : rng.between(1, 60'000);
    SCOPED_TRACE(::testing::Message() << to_string(GetParam()) << " seed " << i << " budget " << budget);
    const SamplingMemory memory = memory_of(decoder, budget);
    std::vector<Tokens> known;
    for (int call = 0; call < 6; ++call) {
      std::vector<Tokens> rows;
      for (int64_t row = rng.between(1, 4); row > 0; --row) rows.push_back(next_prompt(rng, known));
      const Trajectories prompts = from_rows(rows);
      const SampleOptions options{.samples = rng.between(1, 3),
                                  .max_new_tokens = rng.between(1, 9),
                                  .stop_ids = {3},
                                  .seed = static_cast<uint64_t>(rng.below(1000)),
                                  .batch_size = rng.between(1, 6),
                                  .token_budget = rng.below(3) == 0 ? 7 : 1000};
      const SampleResult expected = sample(decoder, prompts, options);
      const SampleResult found = sample(decoder, prompts, options, {}, memory);
      worst = std::max(worst, difference(found.completions, expected.completions));
      EXPECT_LE(memory.tree->bytes(), budget);
      EXPECT_GE(found.kept_prompt_tokens, 0);
      if (budget == kLarge && options.token_budget == 1000) {
        EXPECT_LE(found.encoded_prompt_tokens, expected.encoded_prompt_tokens);
      }
      kept += found.kept_prompt_tokens;
      evicted += budget < kLarge && memory.tree->bytes() < budget;
      for (const Completion& completion : found.completions) known.push_back(continued(prompts, completion));
      for (const Tokens& row : rows) known.push_back(row);
    }
  }
  EXPECT_LE(worst, kExact);
  EXPECT_GT(kept, 100);
  EXPECT_GT(evicted, 0);
}

// A conversation that grows encodes what is new, and the last token of each answer, which was sampled last.
TEST_P(PrefixesOfFamily, OfAConversationThatGrowsAreEncodedOnce) {
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kTokens), 31);
  const SamplingMemory memory = memory_of(decoder, kLarge);
  Rng rng(test_seed(0), 0x9F2);
  Tokens conversation;
  int64_t flat = 0, encoded = 0;
  for (int turn = 0; turn < 6; ++turn) {
    const int64_t given = rng.between(2, 5);
    append_random(rng, given, &conversation);
    const Trajectories prompts = from_rows({conversation});
    const SampleOptions options{.max_new_tokens = 4, .seed = static_cast<uint64_t>(turn)};
    const SampleResult found = sample(decoder, prompts, options, {}, memory);
    EXPECT_EQ(found.encoded_prompt_tokens, given + (turn > 0)) << turn;
    EXPECT_EQ(found.completions.front().kept_tokens, found.kept_prompt_tokens);
    EXPECT_EQ(found.kept_prompt_tokens + found.encoded_prompt_tokens, prompts.num_tokens());
    const SampleResult again = sample(decoder, prompts, options, {}, memory);
    EXPECT_EQ(again.encoded_prompt_tokens, 0) << turn;
    EXPECT_LE(difference(again.completions, found.completions), kExact);
    conversation = continued(prompts, found.completions.front());
    flat += prompts.num_tokens();
    encoded += found.encoded_prompt_tokens;
  }
  EXPECT_GT(flat, 2 * encoded);
}

// Prompts come at any step; each is what it is alone.
TEST_P(PrefixesOfFamily, AreSharedWithPromptsThatJoin) {
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kTokens), 31);
  double worst = 0;
  int64_t most_live = 0, encoded = 0, flat = 0;
  for (int i = 0; i < 6; ++i) {
    Rng rng(test_seed(i), 0x9F3);
    const SampleOptions sizes{.batch_size = rng.between(2, 9), .token_budget = rng.below(2) == 0 ? 30 : 1000};
    Sampling sampling(decoder, sizes, memory_of(decoder, rng.below(2) == 0 ? 0 : kLarge));
    std::vector<Tokens> rows;
    std::vector<SampleOptions> options;
    std::vector<Completion> found;
    while (rows.size() < 12 || !sampling.is_idle()) {
      if (rows.size() < 12 && rng.below(3) == 0) {
        rows.push_back(next_prompt(rng, rows));
        options.push_back({.samples = rng.between(1, 3),
                           .max_new_tokens = rng.between(1, 12),
                           .choice = {.temperature = rng.below(3) == 0 ? 0.0 : 1.0},
                           .stop_ids = {3},
                           .seed = static_cast<uint64_t>(rng.below(1000))});
        sampling.add(static_cast<int64_t>(rows.size()) - 1, rows.back(), options.back(), 0);
      }
      std::map<int64_t, bool> live;
      const auto watch = [&](std::span<const Completion* const> completions) {
        for (const Completion* each : completions) live[each->row] = true;
        return std::vector<bool>();
      };
      for (Completion& completion : sampling.step(watch)) found.push_back(std::move(completion));
      most_live = std::max(most_live, static_cast<int64_t>(live.size()));
    }
    std::ranges::sort(found, {}, [](const Completion& each) { return std::pair(each.row, each.sample); });
    std::vector<Completion> expected;
    for (size_t row = 0; row < rows.size(); ++row) {
      for (Completion& alone : sample(decoder, from_rows({rows[row]}), options[row]).completions) {
        alone.row = static_cast<int64_t>(row);
        expected.push_back(std::move(alone));
      }
    }
    worst = std::max(worst, difference(found, expected));
    encoded += sampling.counts().encoded_prompt_tokens;
    flat += sampling.counts().flat_prompt_tokens;
  }
  EXPECT_LE(worst, kExact);
  EXPECT_GT(most_live, 2);
  EXPECT_LT(encoded, flat);
}

INSTANTIATE_TEST_SUITE_P(Families, PrefixesOfFamily, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return to_string(info.param); });

int64_t encoded_of(const Decoder& decoder, const SamplingMemory& memory, const Tokens& prompt,
                   const SampledWeights& weights = {}) {
  return sample(decoder, from_rows({prompt}), {.max_new_tokens = 1}, {}, memory, alone(), weights)
      .encoded_prompt_tokens;
}

TEST(Prefixes, ThatWereNotUsedForTheLongestTimeGoFirst) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, kTokens), 3);
  const Tokens start{1, 2, 3, 4, 5, 6, 7, 8}, first{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13},
      second{1, 2, 3, 4, 5, 6, 7, 8, 14, 15, 16, 17, 18}, third{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const SamplingMemory all = memory_of(decoder, kLarge);
  encoded_of(decoder, all, start);
  encoded_of(decoder, all, first);
  encoded_of(decoder, all, second);
  // Room for what these have, but not for another one.
  const SamplingMemory memory = memory_of(decoder, all.tree->bytes() + 8);
  encoded_of(decoder, memory, start);
  EXPECT_EQ(encoded_of(decoder, memory, first), 5);
  EXPECT_EQ(encoded_of(decoder, memory, second), 5);
  EXPECT_EQ(encoded_of(decoder, memory, first), 0);   // now the second one is older
  EXPECT_EQ(encoded_of(decoder, memory, third), 13);  // of which two branches have the room
  EXPECT_EQ(encoded_of(decoder, memory, third), 0);
  EXPECT_EQ(encoded_of(decoder, memory, second), 13);
}

TEST(Prefixes, OfOtherWeightsAreNotFound) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, kTokens), 3);
  const Tokens prompt{1, 2, 3, 4};
  const SamplingMemory memory = memory_of(decoder, kLarge);
  EXPECT_EQ(encoded_of(decoder, memory, prompt, {.number = 1}), 4);
  EXPECT_EQ(encoded_of(decoder, memory, prompt, {.number = 1}), 0);
  EXPECT_EQ(encoded_of(decoder, memory, prompt, {.number = 2}), 4);
}

TEST(Prefixes, OfManyNodesAreDroppedWithoutRecursion) {
  PrefixTree tree(tiny_config(Family::kLlama, kTokens), kLarge);
  const Prefix root = tree.root(0);
  Prefix end = tree.add(root, Tokens(500'000, 1), 1);
  EXPECT_EQ(end->end(), 500'000);
  end.reset();
  EXPECT_TRUE(root->children.empty());
}

TEST(Prefixes, AreLeftInOrderByAWatchThatThrows) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3_5, kTokens), 3);
  const Trajectories prompts = from_rows({{1, 2, 3}, {1, 2, 4}});
  const SampleOptions options{.samples = 2, .max_new_tokens = 5};
  const SamplingMemory memory = memory_of(decoder, kLarge);
  int calls = 0;
  const auto watch = [&](std::span<const Completion* const>) -> std::vector<bool> {
    if (++calls == 3) throw std::runtime_error("no more");
    return {};
  };
  Sampling sampling(decoder, options, memory);
  sampling.add(0, prompts.row(0), options, 0);
  EXPECT_THROW(while (!sampling.is_idle()) sampling.step(watch), std::runtime_error);
  EXPECT_TRUE(sampling.is_idle());
  const auto expected = sample(decoder, prompts, options),
             found = sample(decoder, prompts, options, {}, memory);
  EXPECT_LE(difference(found.completions, expected.completions), kExact);
}

}  // namespace
}  // namespace espalier::testing
