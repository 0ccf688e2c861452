// SPDX-License-Identifier: Apache-2.0
// Tree attention on CUDA, every implementation in turn. In low precision it is judged by its error against
// float64, which may be twice that of the dense reference in the same dtype.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string_view>

#include "espalier/ops/attention/cuda.h"
#include "espalier/ops/attention/tree_attention.h"
#include "tests/ops/attention/attention_problem.h"
#include "tests/ops/attention/forced_attention.h"
#include "tests/ops/attention/reference.h"
#include "tests/ops/cuda_device.h"

namespace espalier {
namespace {

using testing::AttentionProblem;
using testing::ForcedAttention;
using testing::ForestShape;
using testing::HeadShape;
using testing::kMaxErrorRatio;
using testing::large_attention_problem;
using testing::PooledErrors;
using testing::relative_error;
using testing::Results;
using testing::rounded;
using testing::same_bits;
using testing::worst_error;

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

at::TensorOptions on_cuda(at::ScalarType dtype) {
  return at::TensorOptions(at::kCUDA).dtype(dtype);
}

Results run(const AttentionProblem& problem, at::ScalarType dtype) {
  return testing::attention_results(&tree_attention, problem, on_cuda(dtype));
}

Results run_reference(const AttentionProblem& problem, at::ScalarType dtype) {
  return testing::attention_results(&reference::tree_attention, problem, on_cuda(dtype));
}

/// The error of `ours` beside that of the reference in the same dtype (tests/error_ratio.h).
PooledErrors errors_of(const AttentionProblem& problem, at::ScalarType dtype, const Results& ours) {
  for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype);
  return {ours, run_reference(problem, dtype), run_reference(problem, at::kDouble)};
}

class TreeAttentionCuda : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!testing::has_cuda_device()) GTEST_SKIP() << "no CUDA device is visible";
    if (!serves(at::kBFloat16, 64)) {
      GTEST_SKIP() << "no such kernels for this device in this build";
    }
  }

  /// Whether the implementation serves such inputs.
  static bool serves(at::ScalarType dtype, int64_t head_dim) {
    const ForcedAttention forced(GetParam());
    try {
      attention_kind({dtype, head_dim});
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }

  /// The check itself: float64 is exact, everything else within twice the reference's error.
  static void expect_equal_to_reference(const AttentionProblem& given, at::ScalarType dtype) {
    const AttentionProblem problem = rounded(given, dtype);
    const ForcedAttention forced(GetParam());
    const Results ours = run(problem, dtype);
    if (dtype == at::kDouble) {
      EXPECT_LE(worst_error(ours, run_reference(problem, dtype)), 1e-12);
    } else {
      EXPECT_TRUE(errors_of(problem, dtype, ours).at_most_twice_the_plain());
    }
  }
};

TEST_P(TreeAttentionCuda, EqualsReferenceInRandomForests) {
  for (uint64_t seed = 0; seed < 4 * testing::kNumForestShapes; ++seed) {
    const auto forest = static_cast<ForestShape>(seed % testing::kNumForestShapes);
    const bool context = seed / testing::kNumForestShapes % 2 == 1;
    const int max_node_tokens = seed < 2 * testing::kNumForestShapes ? 8 : 150;
    for (const at::ScalarType dtype : kDtypes) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << dtype);
      if (!serves(dtype, 64)) continue;
      expect_equal_to_reference(
          large_attention_problem(seed, forest, 300, max_node_tokens, context, {6, 2, 64}), dtype);
    }
  }
}

TEST_P(TreeAttentionCuda, EqualsReferenceForHeadCountsAndDimensions) {
  uint64_t seed = 100;
  for (const int64_t head_dim : {20, 32, 64, 80, 96, 128, 256}) {
    for (const auto& [heads, key_heads] : {std::pair(2, 2), std::pair(9, 3), std::pair(8, 1)}) {
      for (const at::ScalarType dtype : kDtypes) {
        ++seed;
        SCOPED_TRACE(::testing::Message()
                     << "seed " << seed << ", " << heads << " heads of " << head_dim << ", " << dtype);
        if (!serves(dtype, head_dim)) continue;
        expect_equal_to_reference(
            large_attention_problem(seed, ForestShape::kMixed, 400, 40, true, {heads, key_heads, head_dim}),
            dtype);
      }
    }
  }
}

TEST_P(TreeAttentionCuda, EqualsReferenceForAwkwardLengths) {
  for (const int32_t num_tokens : {17, 63, 64, 65, 127, 128, 129, 255, 257, 1023}) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const bool leaves : {false, true}) {  // a chain, or a chain with leaves of one token in its middle
        SCOPED_TRACE(::testing::Message() << num_tokens << " tokens, " << dtype << ", leaves " << leaves);
        if (!serves(dtype, 128)) continue;
        AttentionProblem problem;
        problem.ends.assign(static_cast<size_t>(num_tokens), num_tokens);
        if (leaves) {
          for (int32_t i = num_tokens / 3; i < num_tokens / 2; ++i) problem.ends[i] = i + 1;
        }
        testing::draw_inputs(static_cast<uint64_t>(num_tokens), {4, 2, 128}, problem);
        problem.scale = 0.09;
        expect_equal_to_reference(problem, dtype);
      }
    }
  }
}

// Full or partial is decided by one token: trees that end around the borders of tiles, and below a common
// root.
TEST_P(TreeAttentionCuda, EqualsReferenceWhereTreesEndAroundBordersOfTiles) {
  constexpr int32_t kTokens = 400;
  for (const int64_t head_dim : {64, 128, 256}) {
    const at::ScalarType dtype = serves(at::kBFloat16, head_dim) ? at::kBFloat16 : at::kFloat;
    for (const int32_t end : {1, 2, 63, 64, 65, 66, 126, 127, 128, 129, 130, 191, 192, 193, 256, 398, 399}) {
      for (const int32_t root : {0, 3}) {
        if (end <= root) continue;
        SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << ", end " << end << ", root " << root);
        AttentionProblem problem;
        for (int32_t i = 0; i < kTokens; ++i) problem.ends.push_back(i < root || i >= end ? kTokens : end);
        testing::draw_inputs(static_cast<uint64_t>(end), {2, 1, head_dim}, problem);
        problem.scale = 0.09;
        expect_equal_to_reference(problem, dtype);
      }
    }
  }
}

// More blocks in a level than one call of flash attention is given.
TEST_P(TreeAttentionCuda, EqualsReferenceForManySingleTokens) {
  const at::ScalarType dtype = serves(at::kBFloat16, 128) ? at::kBFloat16 : at::kFloat;
  expect_equal_to_reference(
      large_attention_problem(200, ForestShape::kSingleTokens, 1500, 1, true, {32, 8, 128}), dtype);
}

TEST_P(TreeAttentionCuda, GivesTheLseOfAllKeys) {
  for (const at::ScalarType dtype : kDtypes) {
    if (!serves(dtype, 64)) continue;
    SCOPED_TRACE(dtype);
    const ForcedAttention forced(GetParam());
    const AttentionProblem problem =
        rounded(large_attention_problem(300, ForestShape::kMixed, 300, 30, true, {6, 2, 64}), dtype);
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& input : problem.inputs) inputs.push_back(input.to(on_cuda(dtype)));
    const at::Tensor lse = std::get<1>(testing::call_operator(testing::arguments_of(problem, inputs))).cpu();
    EXPECT_EQ(lse.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
    EXPECT_LE(relative_error(lse, testing::lse_in_float64(problem)), dtype == at::kDouble ? 1e-14 : 1e-6);
  }
}

/// Deterministic algorithms of ATen, and NaN in at::empty, while it lives.
class Deterministic {
 public:
  Deterministic() {
    at::globalContext().setDeterministicFillUninitializedMemory(true);
    at::globalContext().setDeterministicAlgorithms(true, false);
  }
  ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST_P(TreeAttentionCuda, GivesTheSameBitsAgain) {
  const at::ScalarType dtype = serves(at::kBFloat16, 64) ? at::kBFloat16 : at::kFloat;
  const AttentionProblem problem =
      large_attention_problem(400, ForestShape::kMixed, 2000, 300, true, {6, 2, 64});
  const ForcedAttention forced(GetParam());
  // Products of matrices are deterministic, but ATen wants CUBLAS_WORKSPACE_CONFIG set before it says so.
  std::optional<Deterministic> deterministic;
  if (attention_kind({dtype, 64}) != AttentionKind::kMasked) deterministic.emplace();
  const Results one = run(problem, dtype);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Results again = run(problem, dtype);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i], again[i])) << "result " << i;
  }
}

/// Deterministic, where ATen has no more wishes (GivesTheSameBitsAgain).
Results run_deterministic(const AttentionProblem& problem, at::ScalarType dtype) {
  std::optional<Deterministic> deterministic;
  if (attention_kind({dtype, problem.inputs[0].size(2)}) != AttentionKind::kMasked) deterministic.emplace();
  return run(problem, dtype);
}

// Other finite numbers in what a token neither sees nor is seen by. Not NaN: a product of tiles takes it to
// all rows of the tile, times a probability of zero.
TEST_P(TreeAttentionCuda, NeighboursLeaveABranchBitwiseAsItWas) {
  const at::ScalarType dtype = serves(at::kBFloat16, 64) ? at::kBFloat16 : at::kFloat;
  const AttentionProblem problem =
      rounded(large_attention_problem(450, ForestShape::kMixed, 300, 30, false, {4, 2, 64}), dtype);
  const auto tokens = static_cast<int64_t>(problem.ends.size());
  const ForcedAttention forced(GetParam());
  const Results before = run_deterministic(problem, dtype);
  for (const int64_t token : {tokens / 7, tokens / 3, 2 * tokens / 3}) {
    SCOPED_TRACE(token);
    std::vector<int64_t> neighbours;
    int64_t ancestor = token;
    for (int64_t i = tokens - 1; i >= 0; --i) {
      const bool sees = testing::visible(problem.ends, token, i);
      if (sees && i < token) ancestor = i;
      if (!sees && !testing::visible(problem.ends, i, token)) neighbours.push_back(i);
    }
    ASSERT_GT(neighbours.size(), 20u);
    AttentionProblem changed = problem;
    for (at::Tensor& input : changed.inputs)
      input = input.clone().index_fill_(0, at::tensor(neighbours), 3.25);
    const Results after = run_deterministic(changed, dtype);
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(same_bits(before[i][token], after[i][token])) << "result " << i;
    EXPECT_FALSE(same_bits(before[0], after[0]));
    // Negative control: an ancestor is seen.
    if (ancestor == token) continue;
    changed = problem;
    changed.inputs[2] = changed.inputs[2].clone();
    changed.inputs[2][ancestor] += 1;
    EXPECT_FALSE(same_bits(before[0][token], run_deterministic(changed, dtype)[0][token]));
  }
}

TEST_P(TreeAttentionCuda, ContextKeysThatNobodyNamesReachNobody) {
  const at::ScalarType dtype = serves(at::kBFloat16, 64) ? at::kBFloat16 : at::kFloat;
  AttentionProblem problem =
      rounded(large_attention_problem(460, ForestShape::kMixed, 300, 30, false, {4, 2, 64}), dtype);
  const auto tokens = static_cast<int64_t>(problem.ends.size());
  problem.segment_sizes = {200, 60};
  problem.blocks = {0, 3, 131, 0, tokens, 1, 20, 50, 40, tokens / 2};
  testing::draw_inputs(460, {4, 2, 64}, problem);
  const ForcedAttention forced(GetParam());
  const Results before = run_deterministic(problem, dtype);
  const std::pair<int64_t, int64_t> named[] = {{3, 131}, {20, 50}};
  for (size_t input = 3; input < problem.inputs.size(); ++input) {
    const auto [begin, end] = named[(input - 3) % 2];
    const at::Tensor poison = at::full_like(problem.inputs[input], std::numeric_limits<double>::quiet_NaN());
    poison.slice(0, begin, end).copy_(problem.inputs[input].slice(0, begin, end));
    problem.inputs[input] = poison;
  }
  const Results after = run_deterministic(problem, dtype);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << "result " << i;
}

TEST_P(TreeAttentionCuda, TakesStridedInputsAndNoTokens) {
  const at::ScalarType dtype = serves(at::kBFloat16, 64) ? at::kBFloat16 : at::kFloat;
  AttentionProblem problem =
      rounded(large_attention_problem(500, ForestShape::kMixed, 300, 30, true, {4, 2, 64}), dtype);
  const ForcedAttention forced(GetParam());
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : problem.inputs) {
    inputs.push_back(input.to(on_cuda(dtype)).permute({2, 1, 0}).contiguous().permute({2, 1, 0}));
  }
  const auto [q, k, v, tokens, options, context] = testing::arguments_of(problem, inputs);
  EXPECT_TRUE(same_bits(tree_attention(q, k, v, tokens, options, context), run(problem, dtype)[0]));

  const at::Tensor none = at::empty({0, 4, 64}, on_cuda(dtype)).requires_grad_();
  const at::Tensor out = tree_attention(none, none, none, {at::empty({0}, on_cuda(at::kInt))}, {1.0});
  EXPECT_EQ(torch::autograd::grad({out.sum()}, {none})[0].sizes(), none.sizes());
}

TEST_P(TreeAttentionCuda, RefusesWhatDoesNotFit) {
  const at::ScalarType dtype = serves(at::kBFloat16, 64) ? at::kBFloat16 : at::kFloat;
  const ForcedAttention forced(GetParam());
  const at::Tensor q = at::randn({4, 4, 64}, on_cuda(dtype)), k = at::randn({4, 2, 64}, on_cuda(dtype));
  const at::Tensor ends = at::full({4}, 4, on_cuda(at::kInt));
  EXPECT_NO_THROW(tree_attention(q, k, k, {ends}, {1.0}));
  EXPECT_THROW(tree_attention(q, k, k, {ends.cpu()}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q, k.cpu(), k, {ends}, {1.0}), c10::Error);
  const at::Tensor block = testing::blocks_tensor({0, 0, 2, 0, 4});
  EXPECT_NO_THROW(tree_attention(q, k, k, {ends}, {1.0}, {{k}, {k}, block}));
  EXPECT_THROW(tree_attention(q, k, k, {ends}, {1.0}, {{k.cpu()}, {k.cpu()}, block}), c10::Error);
  EXPECT_THROW(tree_attention(q, k, k, {ends}, {1.0}, {{k}, {k}, block.to(at::kCUDA)}), c10::Error);
  EXPECT_THROW(tree_attention(q, k, k, {ends}, {1.0}, {{k}, {k}, block + 1}), std::runtime_error);
}

// The controls are the reference's with a wrong mask: what judges kernels must notice.
TEST_P(TreeAttentionCuda, NegativeControlsAreNoticed) {
  const at::ScalarType dtype = serves(at::kBFloat16, 64) ? at::kBFloat16 : at::kFloat;
  const AttentionProblem problem =
      rounded(large_attention_problem(600, ForestShape::kMixed, 300, 8, true, {4, 2, 64}), dtype);
  const auto tokens = static_cast<int32_t>(problem.ends.size());
  AttentionProblem chain = problem, leaking = problem, lost = problem;
  chain.ends.assign(problem.ends.size(), tokens);
  for (int32_t& end : leaking.ends) end = std::min(end + 1, tokens);
  lost.blocks.resize(lost.blocks.size() - 5);
  for (const AttentionProblem* wrong : {&chain, &leaking, &lost}) {
    EXPECT_GT(errors_of(problem, dtype, run_reference(*wrong, dtype)).worst_ratio(), kMaxErrorRatio);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, TreeAttentionCuda, ::testing::Values("ampere", "masked"),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace espalier
