// SPDX-License-Identifier: Apache-2.0
// Random forests in float64 through real attention blocks: the tree run equals per-trajectory training.
// ESPALIER_LONG_TESTS in the environment makes them many more.
#include <gtest/gtest.h>

#include <cstdlib>

#include "espalier/base/check.h"
#include "tests/engine/outcome.h"
#include "tests/engine/random_steps.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/random_objective.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int kBlocks = 4;  // so that ctest may run them side by side
constexpr int kVocabSizes[] = {5, 19, 47};

int forests_per_block() {
  return std::getenv("ESPALIER_LONG_TESTS") != nullptr ? 2500 : 150;
}

class Exactness : public ::testing::TestWithParam<int> {};

TEST_P(Exactness, RandomForestsEqualPerTrajectoryTraining) {
  std::vector<Decoder> decoders;
  for (const Family family : kFamilies) {
    for (const int vocab_size : kVocabSizes) {
      decoders.push_back(tiny_decoder(tiny_config(family, vocab_size), 17 * GetParam() + vocab_size));
    }
  }
  const int forests = forests_per_block();
  double worst_loss = 0, worst_gradient = 0, worst_logprob = 0;
  int64_t flat = 0, tree = 0, micro_batches = 0;
  for (int i = 0; i < forests; ++i) {
    const int64_t seed = int64_t{100000} * GetParam() + i;
    Rng rng(test_seed(seed), 0xE8AC7);
    const int model = i % static_cast<int>(decoders.size());
    const Decoder& decoder = decoders[model];
    ObjectiveOptions objective = random_objective(rng);
    const auto shape = static_cast<Shape>(rng.below(kNumShapes));
    const Trajectories trajectories = random_rows_for(&objective, rng, shape, decoder.config().vocab_size);
    const PlanOptions plan = random_plan(rng, trajectories);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed,
                             describe(objective, plan, kFamilies[model / std::size(kVocabSizes)], shape)));
    const Step step = make_step(trajectories, all_rows(trajectories), {.plan = plan, .objective = objective});
    const Outcome reference = reference_outcome(decoder, trajectories, objective);
    const Outcome outcome = tree_outcome(decoder, trajectories, step, objective);
    ASSERT_LE(loss_error(outcome, reference), kTolerance) << reference.loss;
    const bool has_norms = has_recurrent_layers(kFamilies[model / std::size(kVocabSizes)]);
    const double error = gradient_error(outcome, reference);
    double bound = has_norms ? kToleranceWithNorms : kTolerance;
    // Where the gradients of trajectories cancel, the rounding of each remains.
    if (error > bound) {
      bound = std::max(bound, 16 * gradient_rounding(decoder, trajectories, objective, reference));
    }
    ASSERT_LE(error, bound);
    ASSERT_LE(logprob_error(outcome, reference), kTolerance);
    worst_loss = std::max(worst_loss, loss_error(outcome, reference));
    worst_gradient = std::max(worst_gradient, gradient_error(outcome, reference));
    worst_logprob = std::max(worst_logprob, logprob_error(outcome, reference));
    flat += step.flat_tokens();
    tree += step.forest.tree_tokens();
    micro_batches += static_cast<int64_t>(step.plan.micro_batches.size());
  }
  // A generator that shared nothing or never cut a forest would prove little.
  EXPECT_GT(flat, tree * 3 / 2);
  EXPECT_GT(micro_batches, forests * 3 / 2);
  std::printf(
      "%d forests, %lld flat and %lld tree tokens, %lld micro-batches: worst error of loss %.2g, gradient "
      "%.2g, "
      "log-prob %.2g\n",
      forests, static_cast<long long>(flat), static_cast<long long>(tree),
      static_cast<long long>(micro_batches), worst_loss, worst_gradient, worst_logprob);
}

INSTANTIATE_TEST_SUITE_P(Blocks, Exactness, ::testing::Range(0, kBlocks));

}  // namespace
}  // namespace espalier::testing
