// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/planner.h"

#include <gtest/gtest.h>

#include "tests/config/tiny_config.h"

namespace espalier::testing {
namespace {

// hidden 16, intermediate 24, 4 heads and 2 of keys of 6 each, vocabulary 37, two layers.
constexpr int64_t kHidden = 16, kInner = 24, kQuery = 24, kKey = 12, kVocabulary = 37, kRank = 3;
constexpr int64_t kAttention = kHidden * (2 * kQuery + 2 * kKey), kMlp = 3 * kHidden * kInner;

ModelSpec adapted_spec() {
  return parse(tiny_config("llama"));
}

ModelCost adapted(const std::vector<std::string>& targets) {
  const ModelSpec spec = adapted_spec();
  return with_adapters(model_cost(spec), spec, {.rank = kRank, .alpha = 1, .targets = targets});
}

TEST(AdapterCost, FlopsLeaveOutTheGradientsOfFrozenWeights) {
  const ModelCost model = adapted({"q_proj", "down_proj"});
  const int64_t q = kRank * (kHidden + kQuery), down = kRank * (kInner + kHidden);
  const Work work{.tokens = 10, .pairs = 55, .logit_rows = 4};
  // What comes after the mixer of the last layer works on logit rows.
  const double weights =
      10.0 * (kAttention + kMlp) + 10.0 * (kAttention - kHidden * kQuery) + 4.0 * (kHidden * kQuery + kMlp);
  const double adapters = 10.0 * (q + down) + 10.0 * q + 4.0 * down;
  const double head = 4.0 * kHidden * kVocabulary;
  const FlopCount forward = forward_flops(model, work), backward = backward_flops(model, work);
  EXPECT_DOUBLE_EQ(forward.linear, 2 * weights + 2 * adapters);
  EXPECT_DOUBLE_EQ(backward.linear, 2 * weights + 4 * adapters);
  EXPECT_DOUBLE_EQ(forward.head, 2 * head);
  EXPECT_DOUBLE_EQ(backward.head, 4 * head);
  EXPECT_DOUBLE_EQ(step_flops(model, work).total(), forward.total() + backward.total());
  EXPECT_DOUBLE_EQ(backward.attention, backward_flops(model_cost(adapted_spec()), work).attention);
}

TEST(AdapterCost, TheHeadsAdapterWorksOnLogitRows) {
  const ModelCost without = adapted({kAllLinear}), with = adapted({kAllLinear, "lm_head"});
  const Work work{.tokens = 10, .pairs = 55, .logit_rows = 4};
  const double weights = kRank * (kHidden + kVocabulary);
  EXPECT_DOUBLE_EQ(with.adapter_weights() - without.adapter_weights(), weights);
  EXPECT_DOUBLE_EQ(forward_flops(with, work).total() - forward_flops(without, work).total(), 2 * 4 * weights);
  EXPECT_DOUBLE_EQ(backward_flops(with, work).total() - backward_flops(without, work).total(),
                   6 * 4 * weights);
}

// A token takes as long as its share of a token of the model trained whole, by FLOPs.
TEST(AdapterCost, TimeGoesByTheSameFlops) {
  const ModelCost whole = model_cost(adapted_spec()), frozen = adapted({kAllLinear});
  const Work work{.tokens = 10, .logit_rows = 10};
  EXPECT_NEAR(layer_tokens(frozen, work) / layer_tokens(whole, work),
              step_flops(frozen, work).linear / step_flops(whole, work).linear, 1e-12);
}

TEST(AdapterCost, ActivationsAreKeptForAdaptersAlone) {
  const ModelCost whole = model_cost(adapted_spec());
  struct Case {
    std::vector<std::string> targets;
    int64_t mixer, mixer_ranks, after, after_ranks;  // more than of the model trained whole
  };
  const Case cases[] = {{{kAllLinear}, 0, 3 * kRank, 0, 4 * kRank},
                        {{"q_proj", "v_proj"}, 0, 2 * kRank, -kHidden - kInner, 0},
                        {{"o_proj", "gate_proj"}, -kHidden, 0, -kInner, 2 * kRank},
                        {{"down_proj"}, -kHidden, 0, -kHidden, kRank}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.targets.front());
    const LayerCost &before = whole.layers[0], now = adapted(c.targets).layers[0];
    EXPECT_EQ(now.kept_by_mixer.elements - before.kept_by_mixer.elements, c.mixer);
    EXPECT_EQ(now.kept_by_mixer.statistics - before.kept_by_mixer.statistics, c.mixer_ranks);
    EXPECT_EQ(now.kept_after_mixer.elements - before.kept_after_mixer.elements, c.after);
    EXPECT_EQ(now.kept_after_mixer.statistics - before.kept_after_mixer.statistics, c.after_ranks);
  }
}

TEST(AdapterCost, ResidentBytesAreThoseOfTheWeightsAndTheAdaptersState) {
  const ModelSpec spec = adapted_spec();
  PlanCosts costs{.time = {.cost = model_cost(spec)}, .memory = {.cost = model_cost(spec)}};
  costs.memory.num_parameters = 10'000;
  costs.memory.element_bytes = 2;
  costs.memory.sum_bytes = 4;
  costs.memory.optimizer_bytes_per_parameter = 8;  // two moments
  const LoraOptions lora{.rank = kRank, .alpha = 1, .targets = {"q_proj"}};
  const PlanCosts frozen = with_adapters(costs, spec, lora);
  const double adapters = 2 * kRank * (kHidden + kQuery);
  // Values, gradients and two moments in float32.
  EXPECT_DOUBLE_EQ(resident_bytes(frozen.memory), 10'000 * 2 + adapters * (4 + 4 + 8));
  EXPECT_DOUBLE_EQ(resident_bytes(costs.memory), 10'000.0 * (2 + 4 + 8));
  EXPECT_TRUE(frozen.time.cost.frozen);
  // The first backward pass makes the sums of adapters alone.
  const Load load{.tokens = 100, .pairs = 5050, .logit_rows = 100};
  EXPECT_LT(running_bytes(frozen.memory, load, false) - running_bytes(frozen.memory, load, true),
            adapters * 4 + 1);
}

}  // namespace
}  // namespace espalier::testing
