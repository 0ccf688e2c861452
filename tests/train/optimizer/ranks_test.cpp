// SPDX-License-Identifier: Apache-2.0
// Steps on several ranks against those of one process, in float64, and what ranks that are not of one mind
// find out.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <optional>
#include <stdexcept>
#include <thread>

#include "espalier/config/lora.h"
#include "espalier/data/builder.h"
#include "espalier/engine/share.h"
#include "espalier/train/optimizer/step_trainer.h"
#include "tests/distributed/thread_ranks.h"
#include "tests/engine/outcome.h"
#include "tests/engine/random_steps.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/random_objective.h"
#include "tests/test_seed.h"
#include "tests/train/optimizer/rank_training.h"

namespace espalier::testing {
namespace {

// Any objective, family, plan and number of ranks, ranks without rows among them.
TEST(Ranks, StepsAreThoseOfOneProcess) {
  constexpr int kCases = 64;
  for (int i = 0; i < kCases; ++i) {
    const Case given = random_case(i);
    const int64_t ranks = 2 + i % 4;
    SCOPED_TRACE(text_of(given, i, ranks));
    const Training expected = train_steps(given, alone());
    const std::vector<Training> found = train_on_ranks(given, ranks);
    for (const Training& training : found) {
      ASSERT_NO_FATAL_FAILURE(expect_same(training, expected, given.objective.has_router_losses()));
      // The same bits on all ranks.
      for (size_t w = 0; w < training.weights.size(); ++w) {
        ASSERT_TRUE(training.weights[w].equal(found[0].weights[w]));
      }
    }
  }
}

TEST(Ranks, MoreThanRowsGiveTheStepsOfOneProcess) {
  for (const Family family : {Family::kLlama, Family::kQwen3Moe, Family::kGptOss}) {
    for (const bool has_lora : {false, true}) {
      SCOPED_TRACE(::testing::Message() << to_string(family) << (has_lora ? " with LoRA" : ""));
      Case given = few_rows(family);
      if (has_lora) given.lora = LoraOptions{.rank = 2, .alpha = 3, .targets = {kAllLinear}};
      const Training expected = train_steps(given, alone());
      for (const Training& training : train_on_ranks(given, 5)) {
        ASSERT_NO_FATAL_FAILURE(expect_same(training, expected, has_experts(family)));
      }
    }
  }
}

// The pass of one rank fails before or after what routers have counted is added up, and the next step is one
// of all again.
TEST(Ranks, AFailedPassOfOneIsThrownByAll) {
  for (const Family family : {Family::kLlama, Family::kQwen3Moe}) {
    const Case given = few_rows(family);
    const double expected = train_steps(given, alone()).results[0].loss;
    for (const bool fails_early : {true, false}) {
      std::vector<std::string> said(3);
      std::vector<double> losses(3);
      const auto thrown = ThreadRanks(3).run([&](const Group& group) {
        StepTrainer trainer(decoder_of(given), {}, group);
        const Loss loss(given.rows, given.objective);
        const Step step = make_share(loss, all_rows(given.rows), {.objective = given.objective}, group);
        try {
          trainer.add_gradients(step, loss, [&](int64_t done, int64_t total) {
            if (group.rank() == 1 && done == (fails_early ? 1 : total)) throw std::runtime_error("planned");
          });
        } catch (const std::exception& error) {
          said[group.rank()] = error.what();
        }
        trainer.zero_gradients();
        losses[group.rank()] = trainer.add_gradients(step, loss).loss;
      });
      EXPECT_EQ(thrown, std::vector<std::string>(3));
      EXPECT_EQ(said, (std::vector<std::string>{"rank 1: planned", "planned", "rank 1: planned"}));
      for (const double loss : losses) EXPECT_LE(relative_difference(loss, expected), kTolerance);
    }
  }
}

TEST(Ranks, EqualNumbersOfThemGiveEqualBits) {
  for (const int i : {0, 5, 11}) {
    const Case given = random_case(i);
    const std::vector<Training> one = train_on_ranks(given, 3), other = train_on_ranks(given, 3);
    for (int s = 0; s < kSteps; ++s) {
      EXPECT_EQ(one[0].results[s].loss, other[0].results[s].loss);
      EXPECT_EQ(one[0].norms[s], other[0].norms[s]);
    }
    for (size_t w = 0; w < one[0].weights.size(); ++w)
      EXPECT_TRUE(one[0].weights[w].equal(other[0].weights[w]));
  }
}

// Calls of add_gradients add up, as those of one process do.
TEST(Ranks, GradientsOfSeveralStepsAddUp) {
  const Case given = random_case(2);
  const auto twice = [&](const Group& group) {
    StepTrainer trainer(decoder_of(given), {}, group);
    const Loss loss(given.rows, given.objective);
    const Step step =
        make_share(loss, all_rows(given.rows), {.plan = given.plan, .objective = given.objective}, group);
    for (int i = 0; i < 2; ++i) trainer.add_gradients(step, loss);
    return trainer.gradient_norm();
  };
  const double expected = twice(alone());
  std::vector<double> norms(3);
  ThreadRanks(3).run([&](const Group& group) { norms[group.rank()] = twice(group); });
  for (const double norm : norms) EXPECT_LE(relative_difference(norm, expected), 1e-12);
}

// Several sources, each with its own objective and normaliser.
TEST(Ranks, MixesAreThoseOfOneProcess) {
  for (int i = 0; i < 12; ++i) {
    Rng rng(test_seed(i), 0xD158);
    Case given{.family = Family::kQwen3, .plan = {}};
    TrajectoriesBuilder together;
    for (const ObjectiveKind kind : {ObjectiveKind::kSft, ObjectiveKind::kGrpo}) {
      MixSource source{.name = std::string(to_string(kind)), .weight = 0.5 + rng.uniform()};
      source.objective = default_options(kind);
      if (rng.below(2) == 0) source.objective.shared_targets = SharedTargets::kOnce;
      const Trajectories rows = random_rows_for(&source.objective, rng, Shape::kDeep, kWords);
      source.num_rows = rows.num_rows();
      together.append(rows, source.name);
      given.mix.push_back(source);
    }
    given.rows = together.finish();
    const Training expected = train_steps(given, alone());
    for (const Training& training : train_on_ranks(given, 3)) {
      ASSERT_NO_FATAL_FAILURE(expect_same(training, expected));
    }
  }
}

TEST(Ranks, EvaluationsAreThoseOfOneProcess) {
  for (int i = 0; i < 16; ++i) {
    const Case given = random_case(i);
    const Loss loss(given.rows, given.objective);
    const Decoder decoder = decoder_of(given);
    const auto evaluated = [&](const Group& group) {
      const Step step =
          make_share(loss, all_rows(given.rows), {.plan = given.plan, .objective = given.objective}, group);
      return finish(start_evaluation(decoder, step, loss), group);
    };
    const StepResult expected = evaluated(alone());
    std::vector<StepResult> found(4);
    ThreadRanks(4).run([&](const Group& group) { found[group.rank()] = evaluated(group); });
    for (const StepResult& result : found) {
      EXPECT_LE(relative_difference(result.loss, expected.loss), 1e-12);
      ASSERT_EQ(result.metrics.size(), expected.metrics.size());
      for (size_t m = 0; m < result.metrics.size(); ++m) {
        EXPECT_LE(relative_difference(result.metrics[m].value, expected.metrics[m].value), 1e-12);
      }
    }
  }
}

TEST(Ranks, UnitsStayWhole) {
  for (int i = 0; i < 200; ++i) {
    const Case given = random_case(i);
    const Loss loss(given.rows, given.objective);
    const StepOptions options{.plan = given.plan, .objective = given.objective};
    const Step step = unplanned_step(given.rows, all_rows(given.rows), options);
    std::vector<int64_t> rank_of(step.rows.size(), -1);
    const auto shares = divide_step(step, loss, options, 1 + i % 5);
    ASSERT_EQ(std::ssize(shares), 1 + i % 5);
    for (size_t rank = 0; rank < shares.size(); ++rank) {
      for (const int64_t k : shares[rank]) {
        ASSERT_EQ(rank_of[k], -1);
        rank_of[k] = static_cast<int64_t>(rank);
      }
    }
    const std::vector<int64_t> units = loss.units_of(step.rows);
    for (size_t a = 0; a < units.size(); ++a) {
      ASSERT_GE(rank_of[a], 0);
      for (size_t b = 0; b < a; ++b) {
        ASSERT_TRUE(units[a] != units[b] || rank_of[a] == rank_of[b]);
      }
    }
    for (int64_t term = 0; term < step.sharers.num_rows(); ++term) {
      for (const int64_t k : step.sharers.row(term)) {
        ASSERT_EQ(rank_of[k], rank_of[step.sharers.row(term).front()]);
      }
    }
  }
}

/// What the ranks throw where the last of them trains on another case.
std::vector<std::string> thrown_with(const Case& given, const Case& of_last) {
  return ThreadRanks(3).run(
      [&](const Group& group) { train_steps(group.rank() == 2 ? of_last : given, group); });
}

TEST(Ranks, AnotherNormaliserOnOneIsFoundByAll) {
  const Case given{.family = Family::kLlama,
                   .rows = from_rows({{1, 2, 3}, {1, 2, 4, 5}, {6, 7}}),
                   .objective = default_options(ObjectiveKind::kSft),
                   .plan = {}};
  Case other = given;
  other.objective.normalize = Normalize::kSequence;
  for (const std::string& error : thrown_with(given, other)) {
    EXPECT_NE(error.find("rows, terms and shares: expected the same on all ranks"), std::string::npos)
        << error;
  }
  for (const std::string& error : thrown_with(given, given)) EXPECT_EQ(error, "");
}

TEST(Ranks, OtherRowsOnOneAreFoundByAll) {
  const Case given{.family = Family::kLlama,
                   .rows = from_rows({{1, 2, 3}, {1, 2, 4, 5}, {6, 7}}),
                   .objective = default_options(ObjectiveKind::kSft),
                   .plan = {}};
  Case other = given;
  other.rows = from_rows({{1, 2, 3}, {1, 2, 4, 5}, {6, 7, 8}});
  for (const std::string& error : thrown_with(given, other)) {
    EXPECT_NE(error.find("expected the same on all ranks"), std::string::npos) << error;
  }
}

/// A group whose last rank does not take one bucket of what others send.
class Dropping : public Group {
 public:
  explicit Dropping(const Group& group) : group_(group) {}
  int64_t rank() const override { return group_.rank(); }
  int64_t size() const override { return group_.size(); }
  int64_t bucket_bytes() const override { return group_.bucket_bytes(); }
  at::Tensor gather(const at::Tensor& own) const override { return group_.gather(own); }
  std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                       const std::vector<int64_t>& receive) const override {
    const auto received = group_.exchange(rows, send, receive);
    if (rank() + 1 < size()) return received;
    return [rows, received] {
      received();
      return rows;
    };
  }

 protected:
  const Group& group_;
};

TEST(Ranks, ADroppedSumOnOneIsFoundByAll) {
  const Case given{.family = Family::kLlama,
                   .rows = from_rows({{1, 2, 3}, {1, 2, 4, 5}, {6, 7}}),
                   .objective = default_options(ObjectiveKind::kSft),
                   .plan = {}};
  const auto thrown = ThreadRanks(2).run([&](const Group& group) { train_steps(given, Dropping(group)); });
  for (const std::string& error : thrown) {
    EXPECT_NE(error.find("expected all elements to add up"), std::string::npos) << error;
  }
}

/// A group whose last rank comes late to everything.
class Late : public Dropping {
 public:
  using Dropping::Dropping;
  at::Tensor gather(const at::Tensor& own) const override {
    wait();
    return group_.gather(own);
  }
  std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                       const std::vector<int64_t>& receive) const override {
    wait();
    return group_.exchange(rows, send, receive);
  }

 private:
  void wait() const {
    if (rank() == size() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
};

TEST(Ranks, ALateOneChangesNoBit) {
  const Case given = few_rows(Family::kQwen3Moe);
  const Training expected = train_on_ranks(given, 3)[0];
  std::vector<Training> found(3);
  ThreadRanks(3).run([&](const Group& group) { found[group.rank()] = train_steps(given, Late(group)); });
  for (const Training& training : found) {
    for (size_t w = 0; w < expected.weights.size(); ++w)
      EXPECT_TRUE(training.weights[w].equal(expected.weights[w]));
  }
}

/// Counts what a rank sends.
class Counting : public Dropping {
 public:
  using Dropping::Dropping;
  std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                       const std::vector<int64_t>& receive) const override {
    widths.push_back(rows.size(1));
    return group_.exchange(rows, send, receive);
  }

  mutable std::vector<int64_t> widths;
};

// With and without activations of layers, LoRA and experts; a rank without rows sends the same buckets.
TEST(Ranks, GradientsAreSentWhileTheLastBackwardPassGoesOn) {
  for (const Family family : {Family::kLlama, Family::kQwen3Moe, Family::kMamba2}) {
    for (const bool has_lora : {false, true}) {
      Case given = few_rows(family);
      given.objective.router_aux_loss_coef = given.objective.router_z_loss_coef = 0;
      if (has_lora) given.lora = LoraOptions{.rank = 8, .alpha = 3, .targets = {kAllLinear}};
      if (has_lora) given.plan.checkpoint_activations = CheckpointActivations::kLayer;
      std::vector<std::vector<int64_t>> widths(4);
      std::vector<size_t> before_the_end(4);
      const auto thrown = ThreadRanks(4).run([&](const Group& group) {
        const Counting counting(group);
        StepTrainer trainer(decoder_of(given), {}, counting);
        const Loss loss(given.rows, given.objective);
        const Step step = make_share(loss, all_rows(given.rows),
                                     {.plan = given.plan, .objective = given.objective}, counting);
        trainer.add_gradients(step, loss, [&](int64_t done, int64_t total) {
          if (done == total) before_the_end[group.rank()] = counting.widths.size();
        });
        widths[group.rank()] = counting.widths;
      });
      EXPECT_EQ(thrown, std::vector<std::string>(4));
      EXPECT_GT(*std::ranges::max_element(before_the_end), 0U) << to_string(family) << has_lora;
      EXPECT_EQ(std::ranges::min(before_the_end), 0U);  // that of the rank without rows
      for (const std::vector<int64_t>& own : widths) EXPECT_EQ(own, widths[0]);
    }
  }
}

// It would add the gradients of one step to those of another.
TEST(Ranks, OneThatIsAStepBehindIsFoundByAll) {
  const Case given = few_rows(Family::kLlama);
  const auto thrown = ThreadRanks(3).run([&](const Group& group) {
    StepTrainer trainer(decoder_of(given), {}, group);
    const Loss loss(given.rows, given.objective);
    for (int64_t row = 0; row < 2; ++row) {
      const Step step =
          make_share(loss, {group.rank() == 2 ? 0 : row}, {.objective = given.objective}, group);
      trainer.zero_gradients();
      trainer.add_gradients(step, loss);
    }
  });
  for (const std::string& error : thrown) {
    EXPECT_NE(error.find("rows, terms and shares: expected the same on all ranks"), std::string::npos)
        << error;
  }
}

// The comparison with one process notices a share that is lost.
TEST(Ranks, ALostShareIsNoticed) {
  const Case given{.family = Family::kLlama,
                   .rows = from_rows({{1, 2, 3}, {1, 2, 4, 5}, {6, 7}}),
                   .objective = default_options(ObjectiveKind::kSft),
                   .plan = {}};
  const Loss loss(given.rows, given.objective);
  const StepOptions options{.plan = given.plan, .objective = given.objective};
  const Step whole = unplanned_step(given.rows, all_rows(given.rows), options);
  const auto shares = divide_step(whole, loss, options, 2);
  StepTrainer trainer(decoder_of(given), {});
  Step step = share_of(whole, shares[0], loss, options);
  plan_step(options, &step);
  trainer.add_gradients(step, loss);
  Outcome half;
  half.gradients = trainer.decoder().gradients();
  EXPECT_GT(gradient_error(half, train_steps(given, alone()).outcome), 1e-6);
}

}  // namespace
}  // namespace espalier::testing
