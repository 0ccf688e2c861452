// SPDX-License-Identifier: Apache-2.0
// Micro-batches that ranks compute together, each a part of the tokens, against one process in float64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/train/optimizer/rank_training.h"

namespace espalier::testing {
namespace {

/// A random case of a family whose layers are attention.
Case attention_case(int i) {
  Case result = random_case(i);
  for (int other = i; has_recurrent_layers(result.family); other += 101) result = random_case(other + 101);
  return result;
}

// Any objective, attention family, plan, way of checkpointing and adapter, on 2 to 6 ranks of which 2, 3, 4
// or all compute micro-batches together. The rows are few, so that some ranks have no token of a micro-batch.
TEST(ContextParallel, StepsAreThoseOfOneProcess) {
  constexpr int kCases = 64;
  const std::pair<int64_t, int64_t> kRanks[] = {{2, 2}, {3, 3}, {4, 2}, {4, 4}, {6, 3}, {6, 2}};
  for (int i = 0; i < kCases; ++i) {
    const Case given = attention_case(i);
    const auto [ranks, together] = kRanks[i % std::ssize(kRanks)];
    SCOPED_TRACE(text_of(given, i, ranks) + fmt::format(", {} together", together));
    const Training expected = train_steps(given, alone());
    const std::vector<Training> found = train_on_ranks(given, ranks, together);
    for (const Training& training : found) {
      ASSERT_NO_FATAL_FAILURE(expect_same(training, expected, given.objective.has_router_losses()));
      for (size_t w = 0; w < training.weights.size(); ++w) {
        ASSERT_TRUE(training.weights[w].equal(found[0].weights[w]));
      }
    }
    // Every token and pair is counted once.
    if (ranks > together) continue;
    ASSERT_EQ(found[0].results[0].work.tokens, expected.results[0].work.tokens);
    ASSERT_EQ(found[0].results[0].work.pairs, expected.results[0].work.pairs);
    ASSERT_EQ(found[0].results[0].work.logit_rows, expected.results[0].work.logit_rows);
  }
}

TEST(ContextParallel, EveryFamilyAndWayOfCheckpointing) {
  int i = 0;
  for (const Family family : kFamilies) {
    if (has_recurrent_layers(family)) continue;
    for (const auto checkpointing :
         {CheckpointActivations::kNone, CheckpointActivations::kLayer, CheckpointActivations::kPiece}) {
      Case given = random_case(1000 + i++);
      given.family = family;
      if (!has_experts(family)) given.objective.router_aux_loss_coef = given.objective.router_z_loss_coef = 0;
      given.plan = {.strategy = Strategy::kPartition,
                    .token_budget = 7,
                    .checkpoint_activations = checkpointing,
                    .offload_context = checkpointing == CheckpointActivations::kPiece && i % 2 == 0};
      SCOPED_TRACE(text_of(given, i, 3));
      const Training expected = train_steps(given, alone());
      for (const Training& training : train_on_ranks(given, 3, 3)) {
        ASSERT_NO_FATAL_FAILURE(expect_same(training, expected, given.objective.has_router_losses()));
      }
    }
  }
}

TEST(ContextParallel, EqualNumbersOfRanksGiveEqualBits) {
  const Case given = attention_case(3);
  const std::vector<Training> one = train_on_ranks(given, 4, 2), other = train_on_ranks(given, 4, 2);
  for (size_t w = 0; w < one[0].weights.size(); ++w)
    EXPECT_TRUE(one[0].weights[w].equal(other[0].weights[w]));
}

/// A rank whose pass fails ends the passes of those that wait for its keys.
TEST(ContextParallel, AFailedPassOfOneIsLearntByAll) {
  const Case given{.family = Family::kLlama,
                   .rows = from_rows({{1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 9, 10, 11}, {6, 7, 8}}),
                   .objective = default_options(ObjectiveKind::kSft),
                   .plan = {.strategy = Strategy::kPartition, .token_budget = 5}};
  const auto thrown = ThreadRanks(2).run([&](const Group& group) {
    const std::unique_ptr<Group> context_group = group.split(2);
    StepTrainer trainer(decoder_of(given), {}, group);
    const Loss loss(given.rows, given.objective);
    const Step step = make_share(
        loss, all_rows(given.rows),
        {.plan = given.plan, .objective = given.objective, .context_group = context_group.get()}, group);
    trainer.add_gradients(step, loss, [&](int64_t, int64_t) {
      if (group.rank() == 1) throw std::runtime_error("planned");
    });
  });
  EXPECT_EQ(thrown, (std::vector<std::string>{"another rank has failed", "rank 1: planned"}));
}

TEST(ContextParallel, AnotherPlanOnOneIsFoundByAll) {
  Case given = few_rows(Family::kLlama), other = given;
  other.plan.token_budget = 4;
  const auto thrown = ThreadRanks(2).run(
      [&](const Group& group) { train_steps(group.rank() == 1 ? other : given, group, 2); });
  for (const std::string& error : thrown) {
    EXPECT_NE(error.find("the plan of the step and its division: expected the same"), std::string::npos)
        << error;
  }
}

/// A group of which one rank spoils what it gets of others.
class Spoiling : public Group {
 public:
  using Spoil = std::function<at::Tensor(const at::Tensor& received)>;
  Spoiling(std::unique_ptr<Group> group, Spoil spoil) : group_(std::move(group)), spoil_(std::move(spoil)) {}
  int64_t rank() const override { return group_->rank(); }
  int64_t size() const override { return group_->size(); }
  int64_t bucket_bytes() const override { return group_->bucket_bytes(); }
  at::Tensor gather(const at::Tensor& own) const override { return group_->gather(own); }
  std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                       const std::vector<int64_t>& receive) const override {
    const at::Tensor received = group_->exchange(rows, send, receive)();
    const bool is_spoilt = rank() == 1 && received.dim() == 2 && received.size(0) > 1;
    return [result = is_spoilt ? spoil_(received) : received] { return result; };
  }

 private:
  std::unique_ptr<Group> group_;
  Spoil spoil_;
};

double error_with(const Case& given, const Spoiling::Spoil& spoil) {
  const Training expected = train_steps(given, alone());
  Outcome outcome;
  const auto thrown = ThreadRanks(2).run([&](const Group& group) {
    const Spoiling context_group(group.split(2), spoil);
    StepTrainer trainer(decoder_of(given), {}, group);
    const Loss loss(given.rows, given.objective);
    const Step step = make_share(
        loss, all_rows(given.rows),
        {.plan = given.plan, .objective = given.objective, .context_group = &context_group}, group);
    trainer.add_gradients(step, loss);
    trainer.gather_gradients();
    if (group.rank() > 0) return;
    for (const at::Tensor& gradient : trainer.decoder().gradients())
      outcome.gradients.push_back(gradient.clone());
  });
  EXPECT_EQ(thrown, std::vector<std::string>(2));
  return gradient_error(outcome, expected.outcome);
}

// The comparisons above notice keys that are in the wrong order, and gradients that are lost or come twice.
TEST(ContextParallel, WrongKeysAndGradientsAreNoticed) {
  const Case given{.family = Family::kLlama,
                   .rows = from_rows({{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14},
                                      {1, 2, 3, 4, 15, 16, 17, 18, 1, 2, 3},
                                      {1, 2, 3, 4, 5, 6, 12, 1, 4}}),
                   .objective = default_options(ObjectiveKind::kSft),
                   .plan = {}};
  EXPECT_LE(error_with(given, [](const at::Tensor& received) { return received; }), kTolerance);
  EXPECT_GT(error_with(given, [](const at::Tensor& received) { return received.flip(0); }), 1e-6);
  EXPECT_GT(error_with(given, [](const at::Tensor& received) { return at::zeros_like(received); }), 1e-6);
  EXPECT_GT(error_with(given, [](const at::Tensor& received) { return 2 * received; }), 1e-6);
}

}  // namespace
}  // namespace espalier::testing
