// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/cost_model.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

const ModelCost kModel =
    model_cost({.hidden_size = 10,
                .vocab_size = 11,
                .layers = std::vector<LayerSpec>(
                    3, {AttentionSpec{.num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 5},
                        DenseMlpSpec{.intermediate_size = 7}})});

TEST(CostModel, LinearParameters) {
  // q 10 x 20, k and v 10 x 10 each, o 20 x 10, gate and up 10 x 7 each, down 7 x 10
  ASSERT_EQ(kModel.layers.size(), 3u);
  EXPECT_EQ(kModel.layers[0].weights, 200 + 100 + 100 + 200 + 70 + 70 + 70);
  EXPECT_EQ(kModel.layers[0].weights_after_mixer, 200 + 70 + 70 + 70);
}

// The last layer's output projection and MLP work on logit rows only.
TEST(CostModel, LastLayerEndsWithTheHeadRows) {
  const auto linear = [](int64_t tokens, int64_t logit_rows) {
    return step_flops(kModel, {.tokens = tokens, .logit_rows = logit_rows}).linear;
  };
  EXPECT_DOUBLE_EQ(linear(100, 100), 6.0 * 810 * 3 * 100);
  EXPECT_DOUBLE_EQ(linear(100, 0), 6.0 * (810 * 2 + 400) * 100);
  EXPECT_DOUBLE_EQ(linear(100, 10), linear(100, 0) + 6.0 * 410 * 10);
}

TEST(CostModel, FlopsOfAStep) {
  const FlopCount flops = step_flops(kModel, {.tokens = 100, .pairs = 1000, .logit_rows = 10});
  EXPECT_DOUBLE_EQ(flops.linear, 6.0 * (810 * 3 * 100 - 410 * 90));
  EXPECT_EQ(flops.attention, 14.0 * 5 * 4 * 3 * 1000);
  EXPECT_EQ(flops.head, 8.0 * 10 * 11 * 10);
  EXPECT_EQ(flops.total(), flops.linear + flops.attention + flops.head);
}

TEST(CostModel, FlopsOfThePasses) {
  const Work work{.tokens = 100, .pairs = 1000, .logit_rows = 10};
  const FlopCount forward = forward_flops(kModel, work), backward = backward_flops(kModel, work);
  EXPECT_DOUBLE_EQ(forward.linear, 2.0 * (810 * 3 * 100 - 410 * 90));
  EXPECT_EQ(forward.attention, 4.0 * 5 * 4 * 3 * 1000);
  EXPECT_EQ(forward.head, 2.0 * 10 * 11 * 10);
  EXPECT_DOUBLE_EQ(forward.total() + backward.total(), step_flops(kModel, work).total());
}

TEST(CostModel, WorkAddsUp) {
  Work work{.tokens = 1, .pairs = 2, .logit_rows = 3};
  work += {.tokens = 10, .pairs = 20, .logit_rows = 30};
  EXPECT_EQ(work.tokens, 11);
  EXPECT_EQ(work.pairs, 22);
  EXPECT_EQ(work.logit_rows, 33);
}

TEST(CostModel, LargeCountsDoNotOverflow) {
  ModelCost model = kModel;
  model.hidden_size = 16'384;
  model.vocab_size = 200'000;
  EXPECT_GT(step_flops(model, {.tokens = 1, .pairs = 1, .logit_rows = 1'000'000'000'000}).head, 2e22);
}

}  // namespace
}  // namespace espalier
