// SPDX-License-Identifier: Apache-2.0
// Clients that share a Sampling: each has its turn, and fails alone.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "espalier/sample/sampler.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int64_t kIds = 19;
constexpr double kRounding = 1e-12;

using Words = std::vector<int32_t>;

std::vector<Completion> all_of(Sampling& sampling, const TokenWatch& watch = {}) {
  std::vector<Completion> found;
  while (!sampling.is_idle()) std::ranges::move(sampling.step(watch), std::back_inserter(found));
  return found;
}

std::vector<Completion> of_row(const std::vector<Completion>& all, int64_t row) {
  std::vector<Completion> found;
  std::ranges::copy_if(all, std::back_inserter(found),
                       [&](const Completion& each) { return each.row == row; });
  std::ranges::sort(found, {}, &Completion::sample);
  return found;
}

/// Of completions that have to be those of the prompt alone.
void expect_as_alone(const Decoder& decoder, const Words& prompt, const SampleOptions& options,
                     const std::vector<Completion>& found) {
  const std::vector<Completion> expected = sample(decoder, from_rows({prompt}), options).completions;
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].error, nullptr);
    EXPECT_EQ(found[i].tokens, expected[i].tokens);
    for (size_t t = 0; t < found[i].logprobs.size(); ++t)
      EXPECT_NEAR(found[i].logprobs[t], expected[i].logprobs[t], kRounding);
  }
}

std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& thrown) {
    return thrown.what();
  }
}

/// For prompts of thousands of tokens.
Decoder long_decoder() {
  DecoderConfig config = tiny_config(Family::kQwen3, kIds);
  config.max_position_embeddings = 4096;
  return tiny_decoder(config, 3);
}

class Clients : public ::testing::TestWithParam<Family> {};

// Sequences rest, go on and come back; each is what it is alone.
TEST_P(Clients, HaveEqualSharesOfAStep) {
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kIds), 31);
  const SampleOptions many{.samples = 9, .max_new_tokens = 20, .seed = 3},
      few{.samples = 3, .max_new_tokens = 12, .seed = 4};
  Sampling sampling(decoder, {.batch_size = 6, .pass_tokens = 4});
  const Words first{1, 2, 3, 4, 5, 6, 7, 8, 9}, second{1, 2, 3, 5};
  sampling.add(0, first, many, 0, /*client=*/0);
  int64_t most_alone = 0, most_beside = 0;
  std::map<int64_t, int64_t> live;
  const auto watch = [&](std::span<const Completion* const> completions) {
    for (const Completion* each : completions) ++live[each->row];
    return std::vector<bool>();
  };
  std::vector<Completion> found;
  for (int step = 0; !sampling.is_idle() || step < 6; ++step) {
    if (step == 5) sampling.add(1, second, few, 0, /*client=*/1);
    live.clear();
    std::ranges::move(sampling.step(watch), std::back_inserter(found));
    if (live.contains(1)) {
      most_beside = std::max(most_beside, live[0]);
    } else {
      most_alone = std::max(most_alone, live[0]);
    }
  }
  EXPECT_GE(most_alone, 6);
  EXPECT_LE(most_beside, 6);  // three that begin and three that go on
  EXPECT_LT(most_beside, most_alone + 1);
  expect_as_alone(decoder, first, many, of_row(found, 0));
  expect_as_alone(decoder, second, few, of_row(found, 1));
}

INSTANTIATE_TEST_SUITE_P(Families, Clients, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return to_string(info.param); });

/// Steps until a prompt of one token is done that comes after many samples of client 0.
int steps_of_a_short_one(int64_t client) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kIds), 3);
  Sampling sampling(decoder, {.batch_size = 4});
  sampling.add(0, Words{1, 2, 3}, {.samples = 100, .max_new_tokens = 50}, 0, 0);
  sampling.add(1, Words{4, 5}, {.samples = 100, .max_new_tokens = 50}, 0, 0);
  for (int step = 0; step < 5; ++step) sampling.step();
  sampling.add(2, Words{6, 7}, {.max_new_tokens = 1}, 0, client);
  for (int steps = 1;; ++steps) {
    for (const Completion& each : sampling.step())
      if (each.row == 2) return steps;
  }
}

TEST(ClientsTest, DoNotWaitForThoseWithManySamples) {
  EXPECT_LE(steps_of_a_short_one(1), 4);
  EXPECT_GT(steps_of_a_short_one(0), 50);  // control: prompts of one client are in order
}

TEST(ClientsTest, DoNotWaitForLongPrompts) {
  const Decoder decoder = long_decoder();
  Sampling sampling(decoder, {.pass_tokens = 128});
  Words prompt(1000, 2);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i % kIds);
  sampling.add(0, prompt, {.max_new_tokens = 1}, 0, 0);
  sampling.add(1, Words{4, 5}, {.max_new_tokens = 1}, 0, 1);
  std::vector<int64_t> order;
  while (!sampling.is_idle()) {
    for (const Completion& each : sampling.step()) order.push_back(each.row);
    EXPECT_FALSE(order.empty());  // with the first pass
  }
  EXPECT_EQ(order, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(sampling.counts().encoded_prompt_tokens, 1002);
}

TEST(ClientsTest, WhoseLogitsAreNotFiniteFailAlone) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kIds), 3);
  const Decoder damaged = tiny_decoder(tiny_config(Family::kQwen3, kIds), 3);
  constexpr int32_t kBad = 7;
  damaged.parameters().front().value.detach()[kBad].fill_(std::nan(""));  // the embedding
  const SampleOptions options{.samples = 3, .max_new_tokens = 6, .choice = {.top_k = 1}, .seed = 5};
  const Words good{1, 2, 3}, bad{1, 2, kBad};
  for (const Completion& each : sample(decoder, from_rows({good}), options).completions)
    ASSERT_EQ(std::ranges::count(each.tokens, kBad), 0);
  EXPECT_THROW(sample(damaged, from_rows({bad}), options), InputError);
  for (const int64_t client : {0, 1}) {
    Sampling sampling(damaged, {});
    sampling.add(0, bad, options, 0, 0);
    sampling.add(1, good, options, 0, client);
    const std::vector<Completion> found = all_of(sampling);
    expect_as_alone(decoder, good, options, of_row(found, 1));
    const std::vector<Completion> failed = of_row(found, 0);
    ASSERT_EQ(failed.size(), 3);
    for (int64_t sample = 0; sample < 3; ++sample) {
      EXPECT_EQ(failed[sample].sample, sample);
      EXPECT_NE(error_text(failed[sample].error).find("logits are not finite"), std::string::npos);
    }
  }
}

TEST(ClientsTest, WhosePromptsAreRemovedLeaveOthersAsTheyAre) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3_5, kIds), 3);
  const SampleOptions options{.samples = 5, .max_new_tokens = 9, .seed = 5};
  const Words first{1, 2, 3}, second{1, 2, 4};
  Sampling sampling(decoder, {.batch_size = 4});
  sampling.add(0, first, options, 0, 0);
  sampling.add(1, second, options, 0, 1);
  for (int step = 0; step < 3; ++step) sampling.step();
  EXPECT_EQ(sampling.remove(0, 0), 5);
  EXPECT_EQ(sampling.remove(0, 0), 0);
  const std::vector<Completion> found = all_of(sampling);
  EXPECT_EQ(found.size(), 5);
  expect_as_alone(decoder, second, options, of_row(found, 1));
}

/// Has no memory for tensors of more bytes than a limit, while it lives.
class LimitedMemory final : public c10::Allocator {
 public:
  LimitedMemory() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 255); }
  ~LimitedMemory() override { c10::SetCPUAllocator(inner_, 255); }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > limit) {
      ++failures;
      throw std::bad_alloc();
    }
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

  size_t limit = ~size_t{0};
  int failures = 0;

 private:
  c10::Allocator* inner_;
};

class ClientsWithoutMemory : public ::testing::TestWithParam<Family> {};

// Fewer go on at a time, and what they have sampled stays; one that has no room by itself fails alone.
TEST_P(ClientsWithoutMemory, GoOnFewerAtATime) {
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kIds), 31);
  const SampleOptions options{.samples = 8, .max_new_tokens = 40, .seed = 3};
  const Words first{1, 2, 3}, second{1, 2, 4};
  LimitedMemory memory;
  Sampling sampling(decoder, {.batch_size = 16});
  sampling.add(0, first, options, 0, 0);
  sampling.add(1, second, options, 0, 1);
  std::map<std::pair<int64_t, int64_t>, size_t> seen;
  const auto watch = [&](std::span<const Completion* const> completions) {
    for (const Completion* each : completions) {
      const size_t next = ++seen[{each->row, each->sample}];
      EXPECT_EQ(each->tokens.size(), next);  // each token is told once
    }
    return std::vector<bool>();
  };
  std::vector<Completion> found;
  for (int step = 0; !sampling.is_idle(); ++step) {
    memory.limit = step == 10 ? 0 : ~size_t{0};
    std::ranges::move(sampling.step(watch), std::back_inserter(found));
  }
  EXPECT_GT(memory.failures, 0);
  memory.limit = ~size_t{0};
  expect_as_alone(decoder, first, options, of_row(found, 0));
  expect_as_alone(decoder, second, options, of_row(found, 1));
}

INSTANTIATE_TEST_SUITE_P(Families, ClientsWithoutMemory,
                         ::testing::Values(Family::kQwen3, Family::kQwen3_5, Family::kMamba2),
                         [](const auto& info) { return to_string(info.param); });

TEST(ClientsTest, WhosePromptsDoNotFitFailAlone) {
  const Decoder decoder = long_decoder();
  Words large(2000, 2);
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<int32_t>(i * i % kIds);
  const Words small{1, 2, 3};
  const SampleOptions options{.samples = 2, .max_new_tokens = 5, .seed = 5};
  for (const int64_t client : {0, 1}) {
    LimitedMemory memory;
    Sampling sampling(decoder, {});
    sampling.add(0, large, options, 0, 0);
    sampling.add(1, small, options, 0, client);
    memory.limit = 120'000;  // bytes: less than a tensor of the larger one
    const std::vector<Completion> found = all_of(sampling);
    EXPECT_GT(memory.failures, 1);
    memory.limit = ~size_t{0};
    const std::vector<Completion> failed = of_row(found, 0);
    ASSERT_EQ(failed.size(), 2);
    EXPECT_NE(failed[0].error, nullptr);
    expect_as_alone(decoder, small, options, of_row(found, 1));
  }
}

}  // namespace
}  // namespace espalier::testing
