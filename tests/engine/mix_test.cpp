// SPDX-License-Identifier: Apache-2.0
// A step on several sources of data: its gradient is the weighted sum of those of its sources.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "espalier/engine/engine.h"
#include "espalier/objective/mix.h"
#include "tests/base/message_of.h"
#include "tests/engine/outcome.h"
#include "tests/engine/random_steps.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/random_objective.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int kVocabSize = 19;

// Sources at random, and their rows apart and together.
struct Drawn {
  std::vector<MixSource> sources;
  std::vector<Trajectories> rows;
  Trajectories all;

  explicit Drawn(Rng& rng) {
    const auto num_sources = rng.between(1, 3);
    const auto shape = static_cast<Shape>(rng.below(kNumShapes));
    TrajectoriesBuilder together;
    int64_t topk = 0;
    for (int64_t i = 0; i < num_sources; ++i) {
      MixSource source{.name = fmt::format("s{}", i), .weight = 0.1 + 2 * rng.uniform()};
      source.objective = random_objective(rng);
      Trajectories drawn = random_rows_for(&source.objective, rng, shape, kVocabSize);
      if (topk > 0 && drawn.ref_topk > 0 && drawn.ref_topk != topk) {  // as many in all files
        source.objective.ref_topk = RefTopk::kNone;
        drawn.ref_topk = 0;
        drawn.ref_topk_ids = {};
        drawn.ref_topk_logprobs = {};
      }
      topk = std::max(topk, drawn.ref_topk);
      source.num_rows = drawn.num_rows();
      together.append(drawn, source.name);
      rows.push_back(std::move(drawn));
      sources.push_back(std::move(source));
    }
    all = together.finish();
  }

  std::string text() const {
    std::string text;
    for (const MixSource& source : sources) {
      text += fmt::format("{} of {}; ", source.weight, describe(source.objective));
    }
    return text;
  }
};

void add(const Outcome& part, double weight, Outcome* sum) {
  sum->loss += weight * part.loss;
  sum->loss_size += weight * part.loss_size;
  if (sum->gradients.empty()) sum->gradients.resize(part.gradients.size());
  for (size_t i = 0; i < part.gradients.size(); ++i) {
    const at::Tensor addend = weight * part.gradients[i];
    sum->gradients[i] = sum->gradients[i].defined() ? sum->gradients[i] + addend : addend;
  }
}

Step step_of(const Drawn& drawn, const PlanOptions& plan) {
  return make_step(drawn.all, {.plan = plan, .mix = drawn.sources});
}

TEST(Mix, IsTheWeightedSumOfItsSourcesByThemselves) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kVocabSize), 5);
  double worst_loss = 0, worst_gradient = 0;
  for (int64_t seed = 0; seed < 100; ++seed) {
    Rng rng(test_seed(seed), 0x313);
    const Drawn drawn(rng);
    const PlanOptions plan = random_plan(rng, drawn.all);
    SCOPED_TRACE(fmt::format("seed {}: {}{} budget {} checkpoints {}", seed, drawn.text(),
                             espalier::to_string(plan.strategy), plan.token_budget,
                             espalier::to_string(plan.checkpoint_activations)));
    Outcome expected;
    for (size_t i = 0; i < drawn.sources.size(); ++i) {
      add(reference_outcome(decoder, drawn.rows[i], drawn.sources[i].objective), drawn.sources[i].weight,
          &expected);
    }
    const Loss loss(drawn.all, drawn.sources);
    const Outcome outcome = tree_outcome(decoder, step_of(drawn, plan), loss);
    ASSERT_LE(loss_error(outcome, expected), kTolerance) << expected.loss;
    ASSERT_LE(gradient_error(outcome, expected), kTolerance);
    worst_loss = std::max(worst_loss, loss_error(outcome, expected));
    worst_gradient = std::max(worst_gradient, gradient_error(outcome, expected));
    // What verify proves it against is the same sum.
    const Outcome reference = reference_outcome(decoder, loss);
    ASSERT_LE(loss_error(reference, expected), kTolerance);
    ASSERT_LE(gradient_error(reference, expected), kTolerance);
    ASSERT_LE(logprob_error(outcome, reference), kTolerance);
  }
  std::printf("worst error of loss %.2g, gradient %.2g\n", worst_loss, worst_gradient);
}

TEST(Mix, TheComparisonNoticesAnotherWeight) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kVocabSize), 5);
  Rng rng(test_seed(3), 0x313);
  const Drawn drawn(rng);
  Drawn other = drawn;
  other.sources.front().weight *= 1.001;
  const Outcome outcome = tree_outcome(decoder, step_of(drawn, {}), Loss(drawn.all, drawn.sources));
  const Outcome changed = tree_outcome(decoder, step_of(other, {}), Loss(other.all, other.sources));
  EXPECT_GT(gradient_error(changed, outcome), 1e-6);
}

TEST(Mix, OfOneSourceIsItsObjectiveBitForBit) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, kVocabSize), 6);
  for (int64_t seed = 0; seed < 30; ++seed) {
    Rng rng(test_seed(seed), 0x313);
    Drawn drawn(rng);
    const MixSource source{"only", 1, drawn.sources.front().objective, drawn.rows.front().num_rows()};
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(source.objective)));
    const Trajectories& rows = drawn.rows.front();
    const PlanOptions plan = random_plan(rng, rows);
    const std::vector<MixSource> mix{source};
    const Step alone = make_step(rows, {.plan = plan, .objective = source.objective});
    const Step mixed = make_step(rows, {.plan = plan, .mix = mix});
    const Outcome a = tree_outcome(decoder, alone, Loss(rows, source.objective));
    const Outcome b = tree_outcome(decoder, mixed, Loss(rows, mix));
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(gradient_error(a, b), 0);
  }
}

// The normaliser of every source is a number c, so that K sources of weight 1/K are one with the number K c.
TEST(Mix, OfEqualSharesIsOneFileNormalisedByAllOfThem) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kVocabSize), 5);
  for (int64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(test_seed(seed), 0x51A);
    ObjectiveOptions objective{.kind = ObjectiveKind::kSft, .normalize = Normalize::kConstant};
    constexpr int kSources = 3;
    TrajectoriesBuilder together;
    std::vector<MixSource> sources;
    for (int i = 0; i < kSources; ++i) {
      const Trajectories rows = random_rows_for(&objective, rng, static_cast<Shape>(1), kVocabSize);
      together.append(rows, "rows");
      sources.push_back({fmt::format("s{}", i), 1.0 / kSources, objective, rows.num_rows()});
      sources.back().objective.normalize_constant = 7;
    }
    const Trajectories all = together.finish();
    objective.normalize_constant = 7 * kSources;
    const Outcome one = reference_outcome(decoder, all, objective);
    const Step step = make_step(all, {.mix = sources});
    const Outcome mixed = tree_outcome(decoder, step, Loss(all, sources));
    EXPECT_LE(loss_error(mixed, one), kTolerance);
    EXPECT_LE(gradient_error(mixed, one), kTolerance);
  }
}

TEST(Mix, HasTheMetricsOfItsSources) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kVocabSize), 5);
  for (int64_t seed = 0; seed < 30; ++seed) {
    Rng rng(test_seed(seed), 0x313);
    const Drawn drawn(rng);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, drawn.text()));
    const PlanOptions plan = random_plan(rng, drawn.all);
    const StepResult mixed = forward_backward(decoder, step_of(drawn, plan), Loss(drawn.all, drawn.sources));
    std::map<std::string, double> expected;
    for (size_t i = 0; i < drawn.sources.size(); ++i) {
      const MixSource& source = drawn.sources[i];
      const Step step = make_step(drawn.rows[i], {.plan = plan, .objective = source.objective});
      const StepResult alone = forward_backward(decoder, step, Loss(drawn.rows[i], source.objective));
      expected["loss/" + source.name] = alone.loss;
      for (const StepMetric& metric : alone.metrics) expected[metric.name + "/" + source.name] = metric.value;
    }
    std::map<std::string, double> received;
    for (const StepMetric& metric : mixed.metrics) received[metric.name] = metric.value;
    ASSERT_EQ(received.size(), expected.size());
    for (const auto& [name, value] : expected) {
      ASSERT_TRUE(received.contains(name)) << name;
      EXPECT_NEAR(received[name], value, 1e-9 * (1 + std::abs(value))) << name;
    }
    decoder.zero_gradients();
  }
}

/// By the log-probabilities of all tokens, row by row, at the temperatures of the loss.
double plain_nll(const Decoder& decoder, const Loss& loss) {
  const Trajectories& rows = loss.trajectories();
  std::vector<double> logprobs(rows.num_tokens());
  compute_logprobs(decoder, loss, make_step(rows, {.terms = TermChoice::kAll}), &logprobs);
  double sum = 0, weights = 0;
  for (int64_t row = 0; row < rows.num_rows(); ++row) {
    for (int64_t i = rows.offsets[row] + 1; i < rows.offsets[row + 1]; ++i) {
      sum -= rows.loss_weights[i] * logprobs[i];
      weights += rows.loss_weights[i];
    }
  }
  return sum / weights;
}

// However both are cut.
TEST(Mix, IsEvaluatedToWhatTrainingComputes) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kVocabSize), 5);
  for (int64_t seed = 0; seed < 100; ++seed) {
    Rng rng(test_seed(seed), 0x313);
    const Drawn drawn(rng);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, drawn.text()));
    const PlanOptions plan = random_plan(rng, drawn.all), other = random_plan(rng, drawn.all);
    const Loss loss(drawn.all, drawn.sources);
    const StepResult found = finish(start_evaluation(decoder, step_of(drawn, plan), loss));
    const StepResult trained = forward_backward(decoder, step_of(drawn, other), loss);
    EXPECT_NEAR(found.loss, trained.loss, 1e-12 * (1 + std::abs(trained.loss)));
    EXPECT_EQ(found.terms, trained.terms);
    ASSERT_EQ(found.metrics.size(), trained.metrics.size() + 1);
    for (size_t m = 0; m < trained.metrics.size(); ++m) {
      EXPECT_EQ(found.metrics[m].name, trained.metrics[m].name);
      const double value = trained.metrics[m].value;
      EXPECT_NEAR(found.metrics[m].value, value, 1e-11 * (1 + std::abs(value))) << trained.metrics[m].name;
    }
    const bool has_every_term = std::ranges::none_of(drawn.sources, [](const MixSource& source) {
      return source.objective.shared_targets == SharedTargets::kOnce;
    });
    if (has_every_term) {
      EXPECT_NEAR(found.metrics.back().value, plain_nll(decoder, loss), 1e-11);
    }
    decoder.zero_gradients();
  }
}

TEST(Mix, FaultsNameTheSource) {
  const auto message = [](std::vector<MixSource> sources) {
    return message_of<InputError>([&] { check_mix(sources); });
  };
  EXPECT_EQ(message({{.name = "a", .weight = 0}}),
            "source a: weight: expected a finite number above 0, received 0");
  EXPECT_EQ(message({{.name = "a", .weight = -1}}),
            "source a: weight: expected a finite number above 0, received -1");
  EXPECT_EQ(message({{.name = "a", .weight = std::nan("")}}),
            "source a: weight: expected a finite number above 0, received nan");
  EXPECT_EQ(message({{.name = "a"}, {.name = "a"}}),
            "mix: expected distinct source names, received `a` twice");
  EXPECT_NE(message({{.name = "a/b"}}).find("expected names of letters"), std::string::npos);
  EXPECT_EQ(message({{.name = "a", .objective = {.clip_low = 2}}}),
            "source a: --clip-low: expected a number from 0 to 1, received 2");
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2}, .trajectory_id = std::string("t")});
  const Trajectories rows = builder.finish();
  const std::vector<MixSource> mix{{.name = "x", .objective = {.kind = ObjectiveKind::kGrpo}, .num_rows = 1}};
  EXPECT_NE(message_of<InputError>([&] {
              Loss(rows, mix);
            }).find("source x: trajectory t (row 0): objective grpo expects `advantages`"),
            std::string::npos);
}

}  // namespace
}  // namespace espalier::testing
