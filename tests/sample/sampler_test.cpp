// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/sampler.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "espalier/base/check.h"
#include "espalier/engine/engine.h"
#include "espalier/verify/causal_sequence.h"
#include "tests/base/message_of.h"
#include "tests/engine/tiny_models.h"
#include "tests/error_ratio.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int64_t kVocabulary = 19;

/// Rows of the logits after each token of a sequence on its own, by the dense forward pass, [T, V] float64.
at::Tensor plain_logits(const Decoder& decoder, const std::vector<int32_t>& tokens) {
  const at::NoGradGuard no_grad;
  const std::vector<int64_t> wide(tokens.begin(), tokens.end());
  const auto size = static_cast<int64_t>(wide.size());
  const at::Tensor ids = at::tensor(wide, at::kLong);
  const at::Tensor hidden = decoder.forward(ids, at::arange(size), CausalSequence(size));
  return hidden.mm(decoder.lm_head().weight.t());
}

std::span<const double> row_of(const at::Tensor& logits, int64_t row) {
  return {logits.const_data_ptr<double>() + row * logits.size(1), static_cast<size_t>(logits.size(1))};
}

std::vector<int32_t> whole(const Trajectories& prompts, const Completion& completion) {
  const auto prompt = prompts.row(completion.row);
  std::vector<int32_t> tokens(prompt.begin(), prompt.end());
  tokens.insert(tokens.end(), completion.tokens.begin(), completion.tokens.end());
  return tokens;
}

SampleOptions random_options(Rng& rng) {
  constexpr double kTemperatures[] = {0, 0.6, 1, 1, 1.5}, kTopP[] = {0.7, 1, 1};
  constexpr int64_t kTokenBudgets[] = {1, 9, 40, 1000};
  SampleOptions options{.samples = rng.between(1, 3),
                        .max_new_tokens = rng.between(1, 14),
                        .choice = {.temperature = kTemperatures[rng.below(5)],
                                   .top_k = rng.below(3) == 0 ? rng.between(1, 10) : 0,
                                   .top_p = kTopP[rng.below(3)]},
                        .seed = static_cast<uint64_t>(rng.below(1000)),
                        .batch_size = rng.between(1, 12),
                        .token_budget = kTokenBudgets[rng.below(4)]};
  if (rng.below(2) == 0) options.stop_ids = {3, static_cast<int32_t>(rng.below(kVocabulary))};
  return options;
}

class SamplerOfFamily : public ::testing::TestWithParam<Family> {};

// Prompts of any tree, in pieces, with sequences that come and go: each is what it would be on its own, token
// by token, from the same random numbers.
TEST_P(SamplerOfFamily, EverySampleIsTheOneThatItsSequenceAloneWouldBe) {
  constexpr int kForests = 6;
  int64_t tokens_seen = 0, encoded = 0, flat = 0;
  double worst = 0;
  const Decoder decoder = tiny_decoder(tiny_config(GetParam(), kVocabulary), 31);
  for (int i = 0; i < kForests; ++i) {
    Rng rng(test_seed(i), 0x5A3);
    const Trajectories prompts = prompts_of(random_trajectories(
        rng, static_cast<Shape>(rng.below(kNumShapes)), {.vocab_size = kVocabulary, .max_length = 30}));
    const SampleOptions options = random_options(rng);
    SCOPED_TRACE(::testing::Message()
                 << to_string(GetParam()) << " seed " << i << ": samples " << options.samples
                 << " batch size " << options.batch_size << " token budget " << options.token_budget
                 << " temperature " << options.choice.temperature);
    const SampleResult result = sample(decoder, prompts, options);
    ASSERT_EQ(static_cast<int64_t>(result.completions.size()), prompts.num_rows() * options.samples);
    TokenChooser chooser(options.choice);
    int64_t sampled = 0;
    for (size_t c = 0; c < result.completions.size(); ++c) {
      const Completion& completion = result.completions[c];
      ASSERT_EQ(completion.row, static_cast<int64_t>(c) / options.samples);
      ASSERT_EQ(completion.sample, static_cast<int64_t>(c) % options.samples);
      const at::Tensor logits = plain_logits(decoder, whole(prompts, completion));
      Rng stream(options.seed,
                 (static_cast<uint64_t>(completion.row) << 32) + static_cast<uint64_t>(completion.sample));
      const int64_t first = prompts.row_size(completion.row) - 1;
      const auto size = static_cast<int64_t>(completion.tokens.size());
      ASSERT_EQ(completion.logprobs.size(), completion.tokens.size());
      for (int64_t t = 0; t < size; ++t) {
        const TokenChoice expected = chooser.choose(row_of(logits, first + t), stream.uniform());
        ASSERT_EQ(completion.tokens[t], expected.token) << "token " << t;
        worst = std::max(worst, std::abs(completion.logprobs[t] - expected.logprob));
        const bool stops = std::ranges::count(options.stop_ids, expected.token) > 0;
        ASSERT_EQ(stops, completion.stopped && t + 1 == size) << "token " << t;
      }
      ASSERT_TRUE(completion.stopped || size == options.max_new_tokens);
      sampled += size;
    }
    ASSERT_EQ(sampled, result.sampled_tokens);
    tokens_seen += sampled;
    encoded += result.encoded_prompt_tokens;
    flat += result.flat_prompt_tokens;
  }
  EXPECT_LE(worst, 1e-12);
  EXPECT_GT(tokens_seen, 100);
  EXPECT_LT(encoded, flat);
  std::printf("%s: %lld tokens, %lld of %lld prompt tokens encoded: log-prob %.2g\n", to_string(GetParam()),
              static_cast<long long>(tokens_seen), static_cast<long long>(encoded),
              static_cast<long long>(flat), worst);
}

// The rows' log-probabilities against the forward pass of training, in the dtype that is trained in.
TEST_P(SamplerOfFamily, LowPrecisionHasTheErrorThatTrainingHas) {
  const DecoderConfig config =
      parse_config(tiny_config_json(GetParam(), kVocabulary, /*wide=*/true), "config.json");
  const Decoder master = tiny_decoder(config, 7);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    SquaredErrors errors;
    const Decoder decoder = cast_decoder(master, dtype), exact = cast_decoder(decoder, at::kDouble);
    for (int i = 0; errors.num_values < 600; ++i) {
      Rng rng(test_seed(i), 0x10F);
      const Trajectories prompts = prompts_of(random_trajectories(
          rng, static_cast<Shape>(rng.below(kNumShapes)), {.vocab_size = kVocabulary, .max_length = 30}));
      const SampleOptions options{.samples = 2, .max_new_tokens = 12, .seed = 5, .batch_size = 8};
      const Trajectories rows = rows_of(sample(decoder, prompts, options).completions, prompts, prompts);
      std::vector<double> training(rows.num_tokens()), truth(rows.num_tokens());
      const Step step = make_step(rows, StepOptions{});
      compute_logprobs(decoder, rows, step, &training);
      compute_logprobs(exact, rows, step, &truth);
      for (int64_t n = 0; n < rows.num_tokens(); ++n) {
        if (rows.loss_weights[n] == 0) continue;
        errors.add(rows.logprobs.values[n], training[n], truth[n]);
      }
    }
    const double roundoff = dtype == at::kFloat ? kFloat32Roundoff : kBFloat16Roundoff;
    EXPECT_TRUE(at_most_twice_the_plain_error(errors, {.unit_roundoff = roundoff}))
        << to_string(GetParam()) << " " << dtype;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, SamplerOfFamily, ::testing::ValuesIn(kFamilies),
                         [](const auto& family) { return std::string(to_string(family.param)); });

Trajectories some_prompts() {
  return from_rows({{1, 2, 3, 4, 5, 6}, {1, 2, 3}, {1, 2, 3, 4, 9}, {7}, {1, 2, 3}, {1, 2, 8, 8}});
}

std::vector<std::vector<int32_t>> tokens_of(const SampleResult& result) {
  std::vector<std::vector<int32_t>> tokens;
  for (const Completion& completion : result.completions) tokens.push_back(completion.tokens);
  return tokens;
}

TEST(Sampler, TokensDoNotDependOnWhatIsSampledBeside) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, kVocabulary), 3);
  const Trajectories prompts = some_prompts();
  const SampleOptions options{.samples = 2, .max_new_tokens = 20, .stop_ids = {4}, .seed = 11};
  const auto together = tokens_of(sample(decoder, prompts, options));
  for (const int64_t batch_size : {1, 3, 7}) {
    SampleOptions other = options;
    other.batch_size = batch_size;
    other.token_budget = 4;
    EXPECT_EQ(tokens_of(sample(decoder, prompts, other)), together) << batch_size;
  }
  SampleOptions more = options;
  more.samples = 3;
  const auto with_more = tokens_of(sample(decoder, prompts, more));
  for (size_t i = 0; i < together.size(); ++i) EXPECT_EQ(with_more[i / 2 * 3 + i % 2], together[i]);
  SampleOptions other_seed = options;
  other_seed.seed = 12;
  EXPECT_NE(tokens_of(sample(decoder, prompts, other_seed)), together);
}

TEST(Sampler, EqualCallsGiveEqualBits) {
  const Decoder decoder =
      cast_decoder(tiny_decoder(tiny_config(Family::kQwen3_5, kVocabulary), 3), at::kFloat);
  const SampleOptions options{.samples = 2, .max_new_tokens = 30, .batch_size = 5};
  const SampleResult first = sample(decoder, some_prompts(), options);
  const SampleResult second = sample(decoder, some_prompts(), options);
  for (size_t i = 0; i < first.completions.size(); ++i) {
    EXPECT_EQ(first.completions[i].tokens, second.completions[i].tokens);
    EXPECT_EQ(first.completions[i].logprobs, second.completions[i].logprobs);
  }
}

// Longer than tails are at first (64 tokens), up to the last position of the model.
TEST(Sampler, CompletionsEndWithTheModelsPositions) {
  nlohmann::json json = tiny_config_json(Family::kQwen2, kVocabulary);
  json["max_position_embeddings"] = 160;
  const Decoder decoder = tiny_decoder(parse_config(json, "config.json"), 3);
  const Trajectories prompts = some_prompts();
  const SampleResult result =
      sample(decoder, prompts, {.samples = 1, .max_new_tokens = 1000, .batch_size = 4});
  double worst = 0;
  for (const Completion& completion : result.completions) {
    const std::vector<int32_t> tokens = whole(prompts, completion);
    ASSERT_EQ(tokens.size(), 160u);
    EXPECT_FALSE(completion.stopped);
    const at::Tensor logprobs = plain_logits(decoder, tokens).log_softmax(-1);
    const int64_t first = prompts.row_size(completion.row);
    for (int64_t t = first; t < 160; ++t) {
      const double expected = row_of(logprobs, t - 1)[tokens[t]];
      worst = std::max(worst, std::abs(completion.logprobs[t - first] - expected));
    }
  }
  EXPECT_LE(worst, 1e-12);
  const Trajectories full = from_rows({std::vector<int32_t>(160, 1)});
  EXPECT_THROW(sample(decoder, full, {}), InputError);
}

TEST(Sampler, RowsAreThoseOfTheDataFormat) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3}, .loss_mask = {0, 0, 1}, .trajectory_id = "a", .group_id = "g"});
  builder.append({.input_ids = {4}});
  const Trajectories given = builder.finish();
  const std::vector<Completion> completions = {
      {.row = 0, .sample = 1, .tokens = {5, 6}, .logprobs = {-1, -2}, .stopped = true},
      {.row = 1, .sample = 0, .tokens = {7}, .logprobs = {-3}}};
  const Trajectories rows = rows_of(completions, given, prompts_of(given));
  const TrajectoryRow first = copy_row(rows, 0), second = copy_row(rows, 1);
  EXPECT_EQ(first.input_ids, (std::vector<int32_t>{1, 2, 5, 6}));
  EXPECT_EQ(first.loss_mask, (std::vector<uint8_t>{0, 0, 1, 1}));
  EXPECT_EQ(first.logprobs, (std::vector<double>{0, 0, -1, -2}));
  EXPECT_EQ(first.trajectory_id, "a/sample-1");
  EXPECT_EQ(first.group_id, "g");
  EXPECT_EQ(second.input_ids, (std::vector<int32_t>{4, 7}));
  EXPECT_EQ(second.trajectory_id, "1/sample-0");
  EXPECT_EQ(second.group_id, "1");
}

TEST(Sampler, WholeRowsKeepTheirLossAndLogprobs) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3}, .loss_mask = {0, 1, 0}, .logprobs = {0, -1.5, 0}});
  builder.append({.input_ids = {4, 5}});
  const Trajectories given = builder.finish();
  const std::vector<Completion> completions = {{.row = 0, .tokens = {6}, .logprobs = {-0.5}},
                                               {.row = 1, .tokens = {7, 8}, .logprobs = {-2, -3}}};
  const Trajectories rows = rows_of(completions, given, prompts_of(given, /*whole_rows=*/true));
  const TrajectoryRow first = copy_row(rows, 0), second = copy_row(rows, 1);
  EXPECT_EQ(first.input_ids, (std::vector<int32_t>{1, 2, 3, 6}));
  EXPECT_EQ(first.loss_mask, (std::vector<uint8_t>{0, 1, 0, 1}));
  EXPECT_EQ(first.logprobs, (std::vector<double>{0, -1.5, 0, -0.5}));
  EXPECT_EQ(second.loss_mask, (std::vector<uint8_t>{0, 0, 1, 1}));
  EXPECT_EQ(second.logprobs, (std::vector<double>{0, 0, -2, -3}));
}

TEST(Sampler, RowsSayHowTheirTokensWereChosen) {
  TrajectoriesBuilder builder;
  builder.append(
      {.input_ids = {1, 2}, .loss_mask = {0, 1}, .logprobs = {0, -1}, .temperature = 0.5, .top_p = 0.75});
  builder.append({.input_ids = {4, 5}});
  const Trajectories given = builder.finish(), prompts = prompts_of(given, /*whole_rows=*/true);
  const std::vector<Completion> completions = {{.row = 0, .tokens = {6}, .logprobs = {-0.5}},
                                               {.row = 1, .tokens = {7}, .logprobs = {-2}}};
  const auto rows = [&](const TokenChoiceOptions& choice) {
    const Trajectories made = rows_of(completions, given, prompts, {.choice = choice});
    return std::pair(copy_row(made, 0), copy_row(made, 1));
  };
  const auto [first, second] = rows({.temperature = 0.5, .top_k = 7});
  EXPECT_EQ(first.temperature, 0.5);
  EXPECT_EQ(first.top_k, 7);
  EXPECT_EQ(first.top_p, 0.75);  // of the tokens that it has kept
  EXPECT_EQ(second.temperature, 0.5);
  EXPECT_EQ(second.top_p, std::nullopt);
  EXPECT_EQ(rows({}).second.temperature, std::nullopt);
  EXPECT_EQ(rows({.temperature = 0}).second.temperature, 0);
  // Tokens of two temperatures.
  check_temperatures(given, prompts, {.choice = {.temperature = 0.5}});
  for (const double temperature : {0.0, 1.0, 0.51}) {
    EXPECT_EQ(message_of<InputError>([&] {
                check_temperatures(given, prompts, {.choice = {.temperature = temperature}});
              }).find("trajectory 0: temperature: expected 0.5, that of the tokens with loss"),
              0u);
  }
  check_temperatures(given, prompts_of(given), {});  // prompts alone
}

TEST(Sampler, OptionsThatAreNotAsSaidAreErrors) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, kVocabulary), 3);
  const Trajectories prompts = some_prompts();
  EXPECT_THROW(sample(decoder, prompts, {.samples = 0}), InputError);
  EXPECT_THROW(sample(decoder, prompts, {.max_new_tokens = 0}), InputError);
  EXPECT_THROW(sample(decoder, prompts, {.batch_size = 0}), InputError);
  EXPECT_THROW(sample(decoder, prompts, {.token_budget = 0}), InputError);
  EXPECT_THROW(sample(decoder, prompts, {.stop_ids = {19}}), InputError);
  EXPECT_THROW(sample(decoder, prompts, {.choice = {.top_p = 2}}), InputError);
}

}  // namespace
}  // namespace espalier::testing
