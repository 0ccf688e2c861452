// SPDX-License-Identifier: Apache-2.0
// Losses of every scope on trees that are cut anywhere, against per-trajectory training in float64. The
// objectives are made up: each depends on all log-probabilities of its scope, and not linearly.
#include "espalier/engine/unit_loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/objective/custom.h"
#include "espalier/objective/policy_gradient.h"
#include "espalier/runtime/tensor_memory.h"
#include "tests/engine/outcome.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

class MadeUpObjective : public Objective {
 public:
  MadeUpObjective() : Objective({}) {}
  std::string_view name() const override { return "made-up"; }
  std::vector<Metric> metrics() const override { return {{"terms_seen"}}; }
  TermBytes term_bytes() const override { return {}; }
};

/// sum over terms of c (log p)^2
class SquaredTerms : public MadeUpObjective {
 public:
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits&) const override {
    return {(terms.coefficient * logprobs.square()).sum(), {at::ones_like(logprobs).sum()}};
  }
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
    return group[0].terms.coefficient * group[0].logprobs.pow(2);
  }
};

/// sum over trajectories of log(1 + exp(-s)), s = the trajectory's sum of c log p
class LogisticOfTrajectory : public MadeUpObjective {
 public:
  Scope scope() const override { return Scope::kTrajectory; }
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override {
    const at::Tensor sums = sum_by_trajectory(terms.coefficient * logprobs, units);
    // Rows without terms add a constant, which no reference has: all rows here have terms.
    return {at::softplus(-sums).sum(), {at::ones_like(logprobs).sum()}};
  }
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
    const at::Tensor sum = (group[0].terms.coefficient * group[0].logprobs).sum();
    return at::log(1 + at::exp(-sum)).unsqueeze(0);
  }
};

/// sum over groups of (the sum over trajectories of s)^2 + the sum of s^3, s as above
class PolynomialOfGroup : public MadeUpObjective {
 public:
  Scope scope() const override { return Scope::kGroup; }
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override {
    const at::Tensor sums = sum_by_trajectory(terms.coefficient * logprobs, units);
    const at::Tensor of_groups =
        at::zeros({units.num_groups}, sums.options()).index_add(0, units.group, sums);
    return {of_groups.square().sum() + sums.pow(3).sum(), {at::ones_like(logprobs).sum()}};
  }
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
    std::vector<at::Tensor> sums;
    for (const ReferenceTrajectory& each : group) {
      sums.push_back((each.terms.coefficient * each.logprobs).sum());
    }
    const at::Tensor all = at::stack(sums);
    return at::cat({all.sum().square().unsqueeze(0), all.pow(3)});
  }
};

/// sum over groups of log(1 + exp(-d)), d = the sum over the group's terms of a c log p. Where a group is a
/// pair with a of 1 and -1 this is the logistic loss of a preference (Rafailov et al., "Direct Preference
/// Optimization", 2023, equation 7, without a reference model).
class LogisticOfPair : public MadeUpObjective {
 public:
  Scope scope() const override { return Scope::kGroup; }
  std::vector<TermColumn> columns() const override { return {TermColumn::kAdvantage}; }
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override {
    const at::Tensor sums = sum_by_trajectory(terms.columns[0] * terms.coefficient * logprobs, units);
    const at::Tensor differences =
        at::zeros({units.num_groups}, sums.options()).index_add(0, units.group, sums);
    return {at::softplus(-differences).sum(), {at::ones_like(logprobs).sum()}};
  }
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
    at::Tensor difference = at::zeros({}, at::kDouble);
    for (const ReferenceTrajectory& each : group) {
      difference = difference + (each.terms.columns[0] * each.terms.coefficient * each.logprobs).sum();
    }
    return at::log(1 + at::exp(-difference)).unsqueeze(0);
  }
};

/// s^2 + the sum over terms of (log p)^3, s = the sum over all terms of the step of log p: computed as a
/// caller does, who gives the gradient as well.
class CubicOfStep : public Custom {
 public:
  CubicOfStep() : Custom({}, &loss_and_gradient) {}
  std::vector<Metric> metrics() const override { return {{"terms_seen"}}; }
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override {
    ObjectiveValue value = Custom::value(logprobs, terms, units);
    value.metrics = {at::ones_like(logprobs).sum()};
    return value;
  }
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
    std::vector<at::Tensor> logprobs;
    for (const ReferenceTrajectory& each : group) logprobs.push_back(each.logprobs);
    const at::Tensor all = at::cat(logprobs);
    return at::cat({all.sum().square().unsqueeze(0), all.pow(3)});
  }

 private:
  static CustomValue loss_and_gradient(std::span<const double> logprobs) {
    double sum = 0, cubes = 0;
    for (const double each : logprobs) {
      sum += each;
      cubes += each * each * each;
    }
    CustomValue value{.loss = sum * sum + cubes};
    for (const double each : logprobs) value.gradient.push_back(2 * sum + 3 * each * each);
    return value;
  }
};

std::shared_ptr<const Objective> made_up(Scope scope) {
  if (scope == Scope::kToken) return std::make_shared<SquaredTerms>();
  if (scope == Scope::kStep) return std::make_shared<CubicOfStep>();
  if (scope == Scope::kTrajectory) return std::make_shared<LogisticOfTrajectory>();
  return std::make_shared<PolynomialOfGroup>();
}

/// Rows with loss on every token, a third of them without a group, the others in groups of any size across
/// trees.
Trajectories grouped_trajectories(Rng& rng, Shape shape) {
  Trajectories drawn = random_trajectories(rng, shape, {.max_rows = 8, .max_length = 24});
  std::vector<std::vector<int32_t>> rows;
  for (int64_t row = 0; row < drawn.num_rows(); ++row) {
    const auto ids = drawn.row(row);
    rows.emplace_back(ids.begin(), ids.end());
    if (rows.back().size() < 2) rows.back().push_back(1);  // so that each has a term
  }
  Trajectories trajectories = from_rows(rows);
  for (size_t row = 0; row < rows.size(); ++row) {
    const int64_t group = rng.below(6);
    trajectories.group_id.push_back(group < 2 ? "" : fmt::format("group {}", group));
  }
  return trajectories;
}

std::vector<PlanOptions> plans_of(const Trajectories& trajectories, Rng& rng) {
  using enum CheckpointActivations;
  int64_t longest = 1;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    longest = std::max(longest, trajectories.row_size(row));
  }
  std::vector<PlanOptions> plans{{Strategy::kTreePacking, 0},
                                 {Strategy::kTreePacking, longest},
                                 {Strategy::kSequencePacking, longest, kLayer}};
  for (const CheckpointActivations checkpoint : {kNone, kLayer, kPiece}) {
    plans.push_back({Strategy::kPartition, rng.between(1, longest), checkpoint});
  }
  plans.push_back({Strategy::kPartition, rng.between(1, longest), kPiece, /*offload_context=*/true});
  return plans;
}

/// The same rows in pairs of a preferred and a rejected one, in any order. Their weights differ in size, so
/// that the gradient of a pair of equal trajectories is not 0 but for rounding.
Trajectories paired_trajectories(const Trajectories& drawn) {
  TrajectoriesBuilder builder;
  for (int64_t row = 0; row < drawn.num_rows() / 2 * 2; ++row) {
    const auto ids = drawn.row(row);
    builder.append({.input_ids = {ids.begin(), ids.end()},
                    .advantage = row < drawn.num_rows() / 2 ? 1.0 : -0.5,
                    .group_id = fmt::format("pair {}", row % (drawn.num_rows() / 2))});
  }
  return builder.finish();
}

/// How often a plan needed a log-prob pass, and how often it did not.
struct Passes {
  int64_t with = 0, without = 0;
};

void expect_per_trajectory_training(const Decoder& decoder, const Trajectories& trajectories,
                                    const std::shared_ptr<const Objective>& objective, Rng& rng,
                                    Passes* passes) {
  const Loss loss(trajectories, objective);
  const Outcome reference = reference_outcome(decoder, loss);
  for (const PlanOptions& plan : plans_of(trajectories, rng)) {
    SCOPED_TRACE(fmt::format("{} budget {} checkpoints {}", espalier::to_string(plan.strategy),
                             plan.token_budget, espalier::to_string(plan.checkpoint_activations)));
    const Step step = make_step(trajectories, {.plan = plan});
    const Outcome outcome = tree_outcome(decoder, step, loss);
    ASSERT_LE(loss_error(outcome, reference), kTolerance) << reference.loss;
    ASSERT_LE(gradient_error(outcome, reference), kTolerance);
    const StepResult result = forward_backward(decoder, step, loss);
    decoder.zero_gradients();
    ASSERT_EQ(result.metrics.size(), 1u);
    EXPECT_EQ(result.metrics[0].name, "terms_seen");
    EXPECT_EQ(result.metrics[0].value, 1);  // the sum over all terms, each once, over their number
    if (objective->scope() == Scope::kToken) continue;
    (needs_logprob_pass(step, loss) ? passes->with : passes->without) += 1;
  }
}

TEST(UnitLoss, EveryScopeEqualsPerTrajectoryTrainingUnderEveryPlan) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, 19), 3);
  Passes passes;
  for (int trial = 0; trial < 10; ++trial) {
    SCOPED_TRACE(fmt::format("trial {}", trial));
    Rng rng(test_seed(trial), 0x5C0BE);
    const auto shape = static_cast<Shape>(rng.below(kNumShapes));
    const Trajectories trajectories = grouped_trajectories(rng, shape);
    for (const Scope scope : {Scope::kToken, Scope::kTrajectory, Scope::kGroup, Scope::kStep}) {
      SCOPED_TRACE(fmt::format("scope {}", static_cast<int>(scope)));
      expect_per_trajectory_training(decoder, trajectories, made_up(scope), rng, &passes);
    }
    if (trajectories.num_rows() < 2 || trial >= 5) continue;
    SCOPED_TRACE("pairs");
    expect_per_trajectory_training(decoder, paired_trajectories(trajectories),
                                   std::make_shared<LogisticOfPair>(), rng, &passes);
  }
  // Both ways have been gone, or this test would show less than it says.
  EXPECT_GT(passes.with, 20);
  EXPECT_GT(passes.without, 20);
}

// [1 2 3] - [4 5 6] - [7 8 9], [10 11 12]   cut into a micro-batch of each node
//         - [13 14 15]
struct CutTree {
  Trajectories trajectories =
      from_rows({{1, 2, 3, 4, 5, 6, 7, 8, 9}, {1, 2, 3, 4, 5, 6, 10, 11, 12}, {1, 2, 3, 13, 14, 15}});

  bool needs_pass(Scope scope, CheckpointActivations checkpoint, const std::vector<std::string>& groups) {
    trajectories.group_id = groups;
    const Step step = make_step(trajectories, {.plan = {Strategy::kPartition, 3, checkpoint}});
    EXPECT_EQ(step.plan.micro_batches.size(), 5u);
    return needs_logprob_pass(step, Loss(trajectories, made_up(scope)));
  }
};

TEST(UnitLoss, AGradientOfAnotherSizeIsRefused) {
  const Custom objective({}, [](std::span<const double>) { return CustomValue{.gradient = {1, 2}}; });
  EXPECT_THROW(objective.value(at::zeros({3}, at::kDouble), {}, {}), InputError);
}

TEST(UnitLoss, APassOfItsOwnRunsOnlyWhereTheOrderOfThePlanNeedsIt) {
  using enum CheckpointActivations;
  CutTree tree;
  // The backward pass of a leaf comes after the forward passes of all its ancestors.
  EXPECT_FALSE(tree.needs_pass(Scope::kTrajectory, kNone, {}));
  EXPECT_FALSE(tree.needs_pass(Scope::kTrajectory, kLayer, {}));
  // Ancestors keep no log-probabilities.
  EXPECT_TRUE(tree.needs_pass(Scope::kTrajectory, kPiece, {}));
  // Groups of one trajectory are trajectories; one that spans leaves is known too late.
  EXPECT_FALSE(tree.needs_pass(Scope::kGroup, kNone, {"a", "b", "c"}));
  EXPECT_TRUE(tree.needs_pass(Scope::kGroup, kNone, {"a", "a", "b"}));
  EXPECT_TRUE(tree.needs_pass(Scope::kGroup, kNone, {"a", "b", "a"}));
  EXPECT_TRUE(tree.needs_pass(Scope::kStep, kNone, {"a", "b", "c"}));
}

TEST(UnitLoss, TheLogprobPassCountsAsRecomputedWork) {
  count_tensor_memory();
  CutTree tree;
  tree.trajectories.group_id = {"a", "a", "a"};
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 19), 3);
  const Step step = make_step(tree.trajectories, {.plan = {Strategy::kPartition, 3}});
  const Loss loss(tree.trajectories, made_up(Scope::kGroup));
  std::vector<int64_t> totals;
  const StepResult result =
      forward_backward(decoder, step, loss, [&](int64_t, int64_t total) { totals.push_back(total); });
  EXPECT_EQ(result.recomputed.tokens, result.work.tokens);
  ASSERT_TRUE(result.logprob_pass.has_value());
  EXPECT_GT(result.logprob_pass->seconds, 0);
  EXPECT_GT(result.logprob_pass->peak_bytes, 0);
  double seconds = result.logprob_pass->seconds;
  for (const MicroBatchMeasure& measure : result.measured) seconds += measure.seconds;
  EXPECT_DOUBLE_EQ(result.measured_seconds(), seconds);
  EXPECT_EQ(totals, std::vector<int64_t>(10, 10));  // both passes of five micro-batches
  // Without need there is none.
  const Loss by_token(tree.trajectories, made_up(Scope::kToken));
  EXPECT_FALSE(forward_backward(decoder, step, by_token).logprob_pass.has_value());
}

}  // namespace
}  // namespace espalier::testing
