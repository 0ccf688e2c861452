// SPDX-License-Identifier: Apache-2.0
// Random forests in float64 through real attention blocks: the tree run equals per-trajectory training.
// ESPALIER_LONG_TESTS in the environment makes it ten times as many.
#include <gtest/gtest.h>

#include <cstdlib>

#include "espalier/base/check.h"
#include "tests/engine/outcome.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/random_objective.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

// Recurrent layers divide by the size of their output (Gated DeltaNet by the lengths of queries and keys as
// well), and a few of some thousand random forests have one that is almost 0.
constexpr double kToleranceWithNorms = 1e-11;
constexpr int kBlocks = 4;  // so that ctest may run them side by side
constexpr int kVocabSizes[] = {5, 19, 47};

int forests_per_block() {
  return std::getenv("ESPALIER_LONG_TESTS") != nullptr ? 2500 : 250;
}

PlanOptions random_plan(Rng& rng, const Trajectories& trajectories) {
  PlanOptions plan;
  constexpr Strategy kStrategies[] = {Strategy::kPartition, Strategy::kPartition, Strategy::kTreePacking,
                                      Strategy::kSequencePacking};
  plan.strategy = kStrategies[rng.below(4)];
  plan.checkpoint_activations =
      static_cast<CheckpointActivations>(rng.below(plan.strategy == Strategy::kPartition ? 3 : 2));
  int64_t smallest = 1;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    smallest = std::max(smallest, trajectories.row_size(row));
  }
  if (plan.strategy == Strategy::kPartition) {
    plan.offload_context = plan.checkpoint_activations == CheckpointActivations::kPiece && rng.below(2) == 0;
    smallest = rng.between(1, smallest);
  }
  // No limit, the smallest budget, or one between.
  const int64_t kind = rng.below(3);
  if (kind > 0) plan.token_budget = smallest + (kind == 1 ? 0 : rng.between(0, trajectories.num_tokens()));
  return plan;
}

std::string describe(const ObjectiveOptions& objective, const PlanOptions& plan, Family family, Shape shape) {
  return fmt::format("{} {} {} budget {} checkpoints {} shape {}", to_string(family),
                     espalier::testing::describe(objective), espalier::to_string(plan.strategy),
                     plan.token_budget, espalier::to_string(plan.checkpoint_activations),
                     static_cast<int>(shape));
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
    const bool reads_policies = is_policy_gradient(objective.kind) || objective.kind == ObjectiveKind::kOpd;
    const Trajectories trajectories =
        rows_for(objective,
                 random_trajectories(rng, shape,
                                     {.vocab_size = decoder.config().vocab_size, .for_grpo = reads_policies}),
                 rng);
    if (!trajectories.logprobs.any()) objective.importance_weights = ImportanceWeights::kNone;  // of nothing
    const PlanOptions plan = random_plan(rng, trajectories);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed,
                             describe(objective, plan, kFamilies[model / std::size(kVocabSizes)], shape)));
    const Step step = make_step(trajectories, all_rows(trajectories), {.plan = plan, .objective = objective});
    const Outcome reference = reference_outcome(decoder, trajectories, objective);
    const Outcome outcome = tree_outcome(decoder, trajectories, step, objective);
    ASSERT_LE(loss_error(outcome, reference), kTolerance) << reference.loss;
    const bool has_norms = has_recurrent_layers(kFamilies[model / std::size(kVocabSizes)]);
    ASSERT_LE(gradient_error(outcome, reference), has_norms ? kToleranceWithNorms : kTolerance);
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
