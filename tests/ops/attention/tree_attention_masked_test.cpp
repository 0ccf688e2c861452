// SPDX-License-Identifier: Apache-2.0
// Tree attention by chunks of queries with a mask, and which implementation serves which inputs on CUDA.
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/attention/tree_attention.h"

#include <gtest/gtest.h>

#include <limits>

#include "espalier/base/check.h"
#include "espalier/ops/attention/cuda.h"
#include "tests/ops/attention/attention_problem.h"
#include "tests/ops/attention/forced_attention.h"

namespace espalier {
namespace {

using testing::AttentionProblem;
using testing::ForcedAttention;
using testing::ForestShape;
using testing::HeadShape;
using testing::PooledErrors;
using testing::relative_error;
using testing::Results;
using testing::run_masked;
using testing::run_reference;
using testing::small_attention_problem;
using testing::worst_error;

constexpr HeadShape kShapes[] = {{4, 2, 8}, {1, 1, 5}, {6, 2, 16}, {3, 3, 9}, {4, 1, 24}};

TEST(TreeAttentionMasked, EqualsReferenceInRandomForests) {
  for (uint64_t seed = 0; seed < 420; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_attention_problem(seed, kShapes[seed % std::size(kShapes)]);
    const Results expected = run_reference(problem);
    ASSERT_LE(worst_error(run_masked(problem), expected), 1e-12);
    ASSERT_LE(worst_error(run_masked(problem, 1), expected), 1e-12);  // a query at a time
    ASSERT_LE(worst_error(run_masked(problem, int64_t{1} << (10 + seed % 5)), expected), 1e-12);
  }
}

TEST(TreeAttentionMasked, GivesTheLseOfAllKeys) {
  for (uint64_t seed = 0; seed < 70; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_attention_problem(seed);
    const at::Tensor expected = testing::lse_in_float64(problem);
    const auto arguments = testing::arguments_of(problem, problem.inputs);
    const at::Tensor lse = std::get<1>(masked_chunks::tree_attention(arguments, 1000));
    EXPECT_LE(relative_error(lse, expected), 1e-13);
    EXPECT_EQ(lse.strides(), expected.strides());
  }
}

TEST(TreeAttentionMasked, ErrorInLowPrecisionIsAtMostTwiceThatOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (uint64_t seed = 0; seed < 2 * testing::kNumForestShapes; ++seed) {
      SCOPED_TRACE(::testing::Message() << dtype << ", seed " << seed);
      const auto forest = static_cast<ForestShape>(seed % testing::kNumForestShapes);
      const int max_node_tokens = seed < testing::kNumForestShapes ? 8 : 100;
      AttentionProblem drawn =
          testing::large_attention_problem(seed, forest, 200, max_node_tokens, seed % 2 == 1, {4, 2, 64});
      if (seed % 3 == 1) drawn.inputs[0] *= 16;  // scores whose lse loses digits
      const AttentionProblem problem = rounded(drawn, dtype);
      const Results exact = run_reference(problem), plain = run_reference(problem, dtype);
      const Results ours = run_masked(problem, 100000, dtype);
      for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype);
      EXPECT_TRUE(PooledErrors(ours, plain, exact).at_most_twice_the_plain());
    }
  }
}

TEST(TreeAttentionMasked, UnnamedKeysReachNobody) {
  AttentionProblem problem = small_attention_problem(3);
  const Results before = run_masked(problem);
  problem.segment_sizes.push_back(7);  // a segment that no block names
  const size_t segments = problem.segment_sizes.size();
  for (int kind = 0; kind < 2; ++kind) {
    problem.inputs.insert(problem.inputs.begin() + 3 + static_cast<int64_t>((kind + 1) * segments - 1),
                          at::full({7, 2, 8}, std::numeric_limits<double>::quiet_NaN(), at::kDouble));
  }
  const Results after = run_masked(problem);
  ASSERT_EQ(after.size(), before.size() + 2);
  EXPECT_LE(worst_error({after[0], after[1], after[2]}, {before[0], before[1], before[2]}), 1e-14);
  EXPECT_EQ(after[3 + segments].abs().max().item<double>(), 0);
}

TEST(TreeAttentionMasked, TakesStridedInputsAndNoTokens) {
  AttentionProblem problem = small_attention_problem(5);
  const Results expected = run_reference(problem);
  for (at::Tensor& input : problem.inputs) input = input.permute({2, 1, 0}).contiguous().permute({2, 1, 0});
  EXPECT_LE(worst_error(run_masked(problem, 500), expected), 1e-12);
  AttentionProblem none;
  testing::draw_inputs(1, {}, none);
  for (const at::Tensor& result : run_masked(none)) EXPECT_EQ(result.size(0), 0);
}

TEST(AttentionKind, IsTheFastestThatServesTheInputs) {
  const ForcedAttention any(nullptr);
  EXPECT_EQ(attention_kind({at::kBFloat16, 128}), AttentionKind::kMasked);  // no kernels without a device
  EXPECT_EQ(attention_kind({at::kHalf, 257}), AttentionKind::kMasked);
  EXPECT_EQ(attention_kind({at::kFloat, 64}), AttentionKind::kMasked);
  EXPECT_EQ(attention_kind({at::kDouble, 64}), AttentionKind::kMasked);
}

TEST(AttentionKind, CanBeForced) {
  {
    const ForcedAttention masked("masked");
    EXPECT_EQ(attention_kind({at::kBFloat16, 128}), AttentionKind::kMasked);
  }
  {
    const ForcedAttention library("library");  // which nobody has registered
    EXPECT_THROW(attention_kind({at::kBFloat16, 128}), c10::Error);
  }
  {
    const ForcedAttention ampere("ampere");  // without a device
    EXPECT_THROW(attention_kind({at::kFloat, 128}), c10::Error);
  }
  const ForcedAttention masked("masked");
  EXPECT_THROW(attention_kind({at::kBFloat16, 128}, AttentionKind::kMasked), c10::Error);
  const ForcedAttention wrong("flash");
  EXPECT_THROW(attention_kind({at::kBFloat16, 128}), InputError);
}

}  // namespace
}  // namespace espalier
