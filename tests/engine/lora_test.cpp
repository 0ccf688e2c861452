// SPDX-License-Identifier: Apache-2.0
// Adapters on random forests in float64, against what they are by definition: per-trajectory training of the
// merged model, whose weights are W + scale B A, and the chain rule from W to A and B.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "espalier/config/lora.h"
#include "espalier/model/init.h"
#include "tests/engine/outcome.h"
#include "tests/engine/random_steps.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/random_objective.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int kForests = 96;
constexpr int64_t kWords = 19;

// Values of an adapter by the name of its map.
struct Pair {
  at::Tensor a, b;
};
std::map<std::string, Pair> pairs_of(const Adapter& adapter) {
  std::map<std::string, Pair> pairs;
  for (const Parameter& parameter : adapter.parameters) {
    const std::string map = parameter.name.substr(0, parameter.name.find(".lora_"));
    (parameter.name.ends_with(kLoraA) ? pairs[map].a : pairs[map].b) = parameter.value.detach();
  }
  return pairs;
}

// Per-trajectory training of the model whose weights are W + scale B A; gradients of the adapter's
// parameters, in their order.
Outcome merged_outcome(const Decoder& base, const Adapter& adapter, double scale, const Loss& loss) {
  const Decoder merged = cast_decoder(base, at::kDouble);
  const std::map<std::string, Pair> pairs = pairs_of(adapter);
  const auto weight_of = [](const std::string& map) { return map + ".weight"; };
  for (const Parameter& weight : merged.weights()) {
    for (const auto& [map, pair] : pairs) {
      if (weight.name == weight_of(map)) weight.value.detach().add_(scale * pair.b.matmul(pair.a));
    }
  }
  Outcome outcome = reference_outcome(merged, loss);
  std::map<std::string, at::Tensor> gradients;
  for (size_t i = 0; i < outcome.gradients.size(); ++i)
    gradients[merged.weights()[i].name] = outcome.gradients[i];
  outcome.gradients.clear();
  for (const Parameter& parameter : adapter.parameters) {
    const std::string map = parameter.name.substr(0, parameter.name.find(".lora_"));
    const at::Tensor gradient = gradients.at(weight_of(map));
    const auto& [a, b] = pairs.at(map);
    outcome.gradients.push_back(
        scale * (parameter.name.ends_with(kLoraA) ? b.t().matmul(gradient) : gradient.matmul(a.t())));
  }
  return outcome;
}

// Some of the maps' names, or all.
std::vector<std::string> random_targets(Rng& rng, const ModelSpec& spec) {
  if (rng.below(4) == 0) return {kAllLinear};
  std::set<std::string> chosen;
  std::vector<std::string> names = target_names(spec, adaptable_maps(spec));
  if (spec.tie_word_embeddings) names.pop_back();  // the head, which cannot be merged
  const auto any = [&] { return names[rng.below(static_cast<int64_t>(names.size()))]; };
  for (int64_t i = rng.between(1, 3); i > 0; --i) chosen.insert(any());
  return {chosen.begin(), chosen.end()};
}

// Nothing before the head is trained, so router losses have no gradient.
TEST(Lora, RouterLossesOfAnAdaptedHeadAlone) {
  const Decoder base = tiny_decoder(tiny_config(Family::kQwen3Moe, kWords), 1);
  const LoraOptions lora{.rank = 2, .alpha = 3, .targets = {std::string(kHeadModule)}};
  const Adapter adapter = random_adapter(adapted_maps(base.config(), lora.targets), lora, 1);
  const Decoder copy = cast_decoder(base, at::kDouble);
  const Decoder adapted(copy.config(), copy.weights(), copy.buffers(), adapter);
  Rng rng(test_seed(1), 0x10bb);
  for (const double coefficient : {0.0, 0.1}) {
    ObjectiveOptions objective{.router_aux_loss_coef = coefficient};
    const Trajectories trajectories = random_rows_for(&objective, rng, Shape{}, kWords);
    const Loss loss(trajectories, objective);
    const Step step = make_step(trajectories, all_rows(trajectories), {.plan = {}, .objective = objective});
    const Outcome outcome = tree_outcome(adapted, step, loss);
    const Outcome reference = merged_outcome(base, adapter, adapter.scale, loss);
    EXPECT_LE(loss_error(outcome, reference), kTolerance);
    EXPECT_LE(gradient_error(outcome, reference), kTolerance);
  }
}

TEST(Lora, RandomForestsEqualPerTrajectoryTrainingOfTheMergedModel) {
  double worst_loss = 0, worst_gradient = 0, worst_logprob = 0, least_wrong = 1;
  int64_t micro_batches = 0;
  for (int i = 0; i < kForests; ++i) {
    const Family family = kFamilies[i % static_cast<int>(std::size(kFamilies))];
    Rng rng(test_seed(i), 0x10ba);
    const Decoder base = tiny_decoder(tiny_config(family, kWords), i);
    const ModelSpec& spec = base.config();
    const LoraOptions lora{.rank = rng.between(1, 5),
                           .alpha = 1 + 3 * rng.uniform(),
                           .rslora = rng.below(2) == 0,
                           .targets = random_targets(rng, spec)};
    ObjectiveOptions objective = random_objective(rng);
    if (has_experts(family) && rng.below(2) == 0) objective.router_aux_loss_coef = 0.1;
    const auto shape = static_cast<Shape>(rng.below(kNumShapes));
    const Trajectories trajectories = random_rows_for(&objective, rng, shape, kWords);
    const PlanOptions plan = random_plan(rng, trajectories);
    SCOPED_TRACE(fmt::format("seed {}: {} targets {}", test_seed(i), describe(objective, plan, family, shape),
                             lora.targets.front()));
    const Adapter adapter = random_adapter(adapted_maps(spec, lora.targets), lora, i);
    const Decoder copy = cast_decoder(base, at::kDouble);
    const Decoder adapted(copy.config(), copy.weights(), copy.buffers(), adapter);
    const Loss loss(trajectories, objective);
    const Step step = make_step(trajectories, all_rows(trajectories), {.plan = plan, .objective = objective});
    const Outcome outcome = tree_outcome(adapted, step, loss);
    const Outcome reference = merged_outcome(base, adapter, adapter.scale, loss);
    ASSERT_LE(loss_error(outcome, reference), kTolerance);
    ASSERT_LE(gradient_error(outcome, reference),
              has_recurrent_layers(family) ? kToleranceWithNorms : kTolerance);
    ASSERT_LE(logprob_error(outcome, reference), kTolerance);
    // Frozen weights have no gradient, nor memory for one.
    for (const Parameter& weight : adapted.weights()) {
      ASSERT_FALSE(weight.value.requires_grad() || weight.value.grad().defined()) << weight.name;
    }
    const Outcome wrong = merged_outcome(base, adapter, 1.01 * adapter.scale, loss);
    least_wrong = std::min(least_wrong, gradient_error(outcome, wrong));
    worst_loss = std::max(worst_loss, loss_error(outcome, reference));
    worst_gradient = std::max(worst_gradient, gradient_error(outcome, reference));
    worst_logprob = std::max(worst_logprob, logprob_error(outcome, reference));
    micro_batches += static_cast<int64_t>(step.plan.micro_batches.size());
  }
  EXPECT_GT(micro_batches, kForests * 3 / 2);
  EXPECT_GT(least_wrong, 1e-4);  // the control: a scale that is wrong by a hundredth
  std::printf("%d forests: worst error of loss %.2g, gradient %.2g, log-prob %.2g\n", kForests, worst_loss,
              worst_gradient, worst_logprob);
}

// Context that micro-batches leave below the first adapter has no gradient, and layers there are computed
// again all the same.
TEST(Lora, AdaptersOfTheLastMlpOrTheHeadAloneInPieces) {
  for (const auto& [family, is_head] : {std::pair(Family::kLlama, false), std::pair(Family::kQwen3_5, false),
                                        std::pair(Family::kQwen3, true)}) {
    const Decoder base = tiny_decoder(tiny_config(family, kWords), 8);
    const ModelSpec& spec = base.config();
    ASSERT_FALSE(is_head && spec.tie_word_embeddings);
    const std::string last = fmt::format("layers.{}.mlp.down_proj", spec.layers.size() - 1);
    const LoraOptions lora{.rank = 2, .alpha = 4, .targets = {is_head ? "lm_head" : last}};
    const Adapter adapter = random_adapter(adapted_maps(spec, lora.targets), lora, 9);
    const Decoder copy = cast_decoder(base, at::kDouble);
    const Decoder adapted(copy.config(), copy.weights(), copy.buffers(), adapter);
    Rng rng(test_seed(10));
    const Trajectories trajectories = random_trajectories(rng, Shape::kDeep, {.vocab_size = kWords});
    const Loss loss(trajectories, ObjectiveOptions{});
    const Outcome reference = merged_outcome(base, adapter, adapter.scale, loss);
    for (const CheckpointActivations checkpoint :
         {CheckpointActivations::kNone, CheckpointActivations::kLayer, CheckpointActivations::kPiece}) {
      SCOPED_TRACE(fmt::format("{} {}", to_string(family), espalier::to_string(checkpoint)));
      const Step step =
          make_step(trajectories, all_rows(trajectories), {.plan = {Strategy::kPartition, 6, checkpoint}});
      EXPECT_GT(step.plan.micro_batches.size(), 2u);
      const Outcome outcome = tree_outcome(adapted, step, loss);
      EXPECT_LE(loss_error(outcome, reference), kTolerance);
      EXPECT_LE(gradient_error(outcome, reference), kToleranceWithNorms);
    }
  }
}

// An adapter as it begins, with B = 0, changes nothing; and only B has a gradient.
TEST(Lora, BeginsAsTheModelItself) {
  const Decoder base = tiny_decoder(tiny_config(Family::kQwen3, kWords), 3);
  const ModelSpec& spec = base.config();
  const LoraOptions lora{.rank = 3, .alpha = 6, .targets = {kAllLinear}};
  const Decoder copy = cast_decoder(base, at::kDouble);
  const Decoder adapted(copy.config(), copy.weights(), copy.buffers(),
                        init_adapter(adapted_maps(spec, lora.targets), lora, 7, at::kDouble));
  Rng rng(test_seed(4));
  const Trajectories trajectories = random_trajectories(rng, Shape::kMixed, {.vocab_size = kWords});
  const Step step = make_step(trajectories, all_rows(trajectories), {});
  const Outcome plain = tree_outcome(base, trajectories, step, {});
  const Outcome outcome = tree_outcome(adapted, trajectories, step, {});
  EXPECT_NEAR(outcome.loss, plain.loss, kTolerance * plain.loss);
  EXPECT_LE(logprob_error(outcome, plain), kTolerance);
  for (size_t i = 0; i < outcome.gradients.size(); ++i) {
    const bool is_b = adapted.parameters()[i].name.ends_with(kLoraB);
    EXPECT_EQ(outcome.gradients[i].norm().item<double>() > 0, is_b) << adapted.parameters()[i].name;
  }
}

}  // namespace
}  // namespace espalier::testing
