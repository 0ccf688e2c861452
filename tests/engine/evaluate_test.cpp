// SPDX-License-Identifier: Apache-2.0
// Loss and metrics by forward passes alone, against those of training.
#include "espalier/engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/engine/random_steps.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/random_objective.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int kSteps = 150;

double relative_difference(double a, double b) {
  return std::abs(a - b) / std::max(1.0, std::abs(b));
}

/// By the log-probabilities of all tokens, row by row, at the temperatures of the loss.
double plain_nll(const Decoder& decoder, const Loss& loss, const Step& step) {
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
  EXPECT_EQ(static_cast<int64_t>(step.rows.size()), rows.num_rows());
  return sum / weights;
}

// However both are cut: any objective with any options, any family, any plan, twice.
TEST(Evaluate, GivesLossAndMetricsOfTraining) {
  double worst = 0;
  for (int i = 0; i < kSteps; ++i) {
    Rng rng(test_seed(i), 0xE7A1);
    const Family family = kFamilies[rng.below(std::ssize(kFamilies))];
    const auto shape = static_cast<Shape>(rng.below(kNumShapes));
    ObjectiveOptions objective = random_objective(rng);
    const Decoder decoder = tiny_decoder(tiny_config(family, 19), 1 + i % 5);
    if (decoder.routers().count() == 0) {
      objective.router_aux_loss_coef = objective.router_z_loss_coef = 0;
    }
    if (rng.below(3) == 0) objective.entropy_coef = 0.3;
    const Trajectories rows = random_rows_for(&objective, rng, shape, 19);
    const PlanOptions plan = random_plan(rng, rows), other = random_plan(rng, rows);
    SCOPED_TRACE(::testing::Message() << "seed " << i << ": " << describe(objective, plan, family, shape));
    const Loss loss(rows, objective);
    const Step step = make_step(rows, {.plan = plan, .objective = objective});
    const StepResult found = finish(start_evaluation(decoder, step, loss));
    const StepResult trained =
        forward_backward(decoder, make_step(rows, {.plan = other, .objective = objective}), loss);
    worst = std::max(worst, relative_difference(found.loss, trained.loss));
    EXPECT_LT(relative_difference(found.loss, trained.loss), 1e-12);
    EXPECT_EQ(found.terms, trained.terms);
    ASSERT_EQ(found.metrics.size(), trained.metrics.size() + 1);
    for (size_t m = 0; m < trained.metrics.size(); ++m) {
      EXPECT_EQ(found.metrics[m].name, trained.metrics[m].name);
      EXPECT_LT(relative_difference(found.metrics[m].value, trained.metrics[m].value), 1e-11)
          << trained.metrics[m].name;
    }
    if (objective.shared_targets == SharedTargets::kSum) {
      EXPECT_LT(relative_difference(found.metrics.back().value, plain_nll(decoder, loss, step)), 1e-12);
    }
    const StepResult again = finish(start_evaluation(decoder, step, loss));
    EXPECT_EQ(again.loss, found.loss);
    for (size_t m = 0; m < found.metrics.size(); ++m)
      EXPECT_EQ(again.metrics[m].value, found.metrics[m].value);
  }
  RecordProperty("worst", std::to_string(worst));
}

TEST(Evaluate, LeavesGradientsAlone) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, 19), 3);
  const Trajectories rows = from_rows({{1, 2, 3, 4}, {1, 2, 5}});
  const Loss loss(rows, ObjectiveOptions{});
  finish(start_evaluation(decoder, make_step(rows, {}), loss));
  for (const at::Tensor& gradient : decoder.gradients()) EXPECT_FALSE(gradient.defined());
}

}  // namespace
}  // namespace espalier::testing
