// SPDX-License-Identifier: Apache-2.0
// A training of a few steps on several ranks, and how it compares with that of one process.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "espalier/config/lora.h"
#include "espalier/engine/share.h"
#include "espalier/train/optimizer/step_trainer.h"
#include "tests/distributed/thread_ranks.h"
#include "tests/engine/outcome.h"
#include "tests/engine/random_steps.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/random_objective.h"
#include "tests/test_seed.h"

namespace espalier::testing {

inline constexpr int64_t kWords = 19;
inline constexpr int kSteps = 2;

/// What a training of a few steps on the same rows gives.
struct Training {
  std::vector<StepResult> results;
  std::vector<double> norms;
  Outcome outcome;                  // loss and gradients of the first step
  std::vector<at::Tensor> weights;  // after the last
};

struct Case {
  Family family;
  Trajectories rows;
  ObjectiveOptions objective;
  std::vector<MixSource> mix{};
  PlanOptions plan;
  std::optional<LoraOptions> lora{};
  OptimizerKind optimizer = OptimizerKind::kSgd;
};

inline Decoder decoder_of(const Case& given) {
  const Decoder base = tiny_decoder(tiny_config(given.family, kWords), 5);
  if (!given.lora) return base;
  const Adapter adapter = random_adapter(adapted_maps(base.config(), given.lora->targets), *given.lora, 6);
  return Decoder(base.config(), base.weights(), base.buffers(), adapter);
}

/// `together`: ranks that compute every micro-batch together.
inline Training train_steps(const Case& given, const Group& group, int64_t together = 1) {
  const std::unique_ptr<Group> context_group = together > 1 ? group.split(together) : nullptr;
  StepTrainer trainer(decoder_of(given), {.kind = given.optimizer}, group);
  const Loss loss = make_loss(given.rows, given.objective, given.mix);
  Training training;
  for (int i = 0; i < kSteps; ++i) {
    const Step step = make_share(loss, all_rows(given.rows),
                                 {.plan = given.plan,
                                  .objective = given.objective,
                                  .mix = given.mix,
                                  .context_group = context_group.get()},
                                 group);
    trainer.zero_gradients();
    training.results.push_back(trainer.add_gradients(step, loss));
    training.norms.push_back(trainer.gradient_norm());
    if (i == 0) {
      training.outcome.loss = training.results[0].loss;
      trainer.gather_gradients();
      for (const at::Tensor& gradient : trainer.decoder().gradients()) {
        training.outcome.gradients.push_back(gradient.clone());
      }
    }
    trainer.update(0.01, training.norms.back());
  }
  for (const Parameter& parameter : trainer.decoder().parameters()) {
    training.weights.push_back(parameter.value.detach().clone());
  }
  return training;
}

inline std::vector<Training> train_on_ranks(const Case& given, int64_t ranks, int64_t together = 1) {
  std::vector<Training> trainings(ranks);
  const std::vector<std::string> thrown = ThreadRanks(ranks).run(
      [&](const Group& group) { trainings[group.rank()] = train_steps(given, group, together); });
  for (const std::string& error : thrown) EXPECT_EQ(error, "");
  return trainings;
}

inline double relative_difference(double a, double b) {
  return std::abs(a - b) / std::max(1.0, std::abs(b));
}

inline void expect_same(const Training& found, const Training& expected, bool has_router_losses = false) {
  ASSERT_EQ(found.results.size(), expected.results.size());
  ASSERT_LE(gradient_error(found.outcome, expected.outcome), kTolerance);
  for (size_t i = 0; i < expected.results.size(); ++i) {
    const StepResult &a = found.results[i], &b = expected.results[i];
    ASSERT_LE(relative_difference(a.loss, b.loss), kTolerance);
    ASSERT_LE(relative_difference(found.norms[i], expected.norms[i]), kTolerance);
    ASSERT_EQ(a.flat_tokens, b.flat_tokens);
    ASSERT_EQ(a.tree_tokens, b.tree_tokens);
    ASSERT_EQ(a.terms, b.terms);
    ASSERT_GE(a.work.tokens, 0);
    ASSERT_EQ(a.metrics.size(), b.metrics.size());
    for (size_t m = 0; m < a.metrics.size(); ++m) {
      ASSERT_EQ(a.metrics[m].name, b.metrics[m].name);
      ASSERT_LE(relative_difference(a.metrics[m].value, b.metrics[m].value), kTolerance) << a.metrics[m].name;
    }
    ASSERT_EQ(a.routers.has_value(), b.routers.has_value());
    if (!a.routers) continue;
    ASSERT_LE(relative_difference(a.routers->aux_loss, b.routers->aux_loss), kTolerance);
    ASSERT_LE(relative_difference(a.routers->z_loss, b.routers->z_loss), kTolerance);
    // Without router losses, micro-batches without loss do not run, nor are their tokens counted.
    if (!has_router_losses) continue;
    ASSERT_EQ(a.routers->load_max, b.routers->load_max);
    ASSERT_EQ(a.routers->load_min, b.routers->load_min);
  }
  for (size_t i = 0; i < expected.weights.size(); ++i) {
    ASSERT_LE((found.weights[i] - expected.weights[i]).abs().max().item<double>(), kTolerance);
  }
}

inline Case random_case(int i) {
  Rng rng(test_seed(i), 0xD157);
  Case result;
  result.family = kFamilies[i % std::ssize(kFamilies)];
  result.objective = random_objective(rng);
  if (has_experts(result.family) && rng.below(2) == 0) {
    result.objective.router_aux_loss_coef = 0.1;
    result.objective.router_z_loss_coef = 0.05;
  } else {
    result.objective.router_aux_loss_coef = result.objective.router_z_loss_coef = 0;
  }
  const auto shape = static_cast<Shape>(rng.below(kNumShapes));
  result.rows = random_rows_for(&result.objective, rng, shape, kWords);
  result.plan = random_plan(rng, result.rows);
  if (rng.below(4) == 0) result.lora = LoraOptions{.rank = 2, .alpha = 3, .targets = {kAllLinear}};
  return result;
}

inline std::string text_of(const Case& given, int i, int64_t ranks) {
  return fmt::format("seed {}, {} ranks, {} rows: {}", i, ranks, given.rows.num_rows(),
                     describe(given.objective, given.plan, given.family, Shape::kMixed));
}

/// A tree of two rows, and one of another, with losses of routers if there are any.
inline Case few_rows(Family family) {
  Case result{.family = family,
              .rows = from_rows({{1, 2, 3, 4}, {1, 2, 5}, {6, 7}}),
              .objective = default_options(ObjectiveKind::kSft),
              .plan = {}};
  if (!has_experts(family)) return result;
  result.objective.router_aux_loss_coef = 0.1;
  result.objective.router_z_loss_coef = 0.05;
  return result;
}

}  // namespace espalier::testing
