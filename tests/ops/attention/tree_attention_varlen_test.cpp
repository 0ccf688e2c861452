// SPDX-License-Identifier: Apache-2.0
// Tree attention by mask blocks: what surrounds the attention to sequences, in float64 on the CPU, through
// ATen's flash attention for the CPU and through the calls that are made on CUDA (fake_flash.h).
#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/attention/varlen.h"

#include <gtest/gtest.h>

#include "espalier/ops/attention/mask_blocks.h"
#include "tests/ops/attention/attention_problem.h"
#include "tests/ops/attention/fake_flash.h"

namespace espalier {
namespace {

using testing::AttentionProblem;
using testing::FakeFlash;
using testing::ForestShape;
using testing::HeadShape;
using testing::PooledErrors;
using testing::relative_error;
using testing::Results;
using testing::small_attention_problem;
using testing::worst_error;
using varlen::AttentionResult;
using varlen::flash_cpu;
using varlen::flash_cuda;
using varlen::PackedSequences;
using varlen::SequenceAttention;
using varlen::SequenceGradients;
using varlen::SequenceInputs;

constexpr HeadShape kShapes[] = {{4, 2, 8}, {1, 1, 5}, {6, 2, 16}, {3, 3, 9}, {4, 1, 24}};

/// The calls of CUDA, in smaller calls and with a fault, if asked.
class WatchedFlash final : public SequenceAttention {
 public:
  explicit WatchedFlash(int64_t max_sequences, bool own_lse = false)
      : max_sequences_(max_sequences), own_lse_(own_lse) {}

  at::ScalarType dtype(at::ScalarType dtype) const override { return flash_cuda().dtype(dtype); }
  int64_t max_sequences(int64_t, int64_t) const override { return max_sequences_; }
  AttentionResult forward(const SequenceInputs& inputs, const PackedSequences& sequences) const override {
    ++calls;
    most_sequences = std::max(most_sequences, sequences.size());
    return flash_cuda().forward(inputs, sequences);
  }
  SequenceGradients backward(const at::Tensor& grad_out, const SequenceInputs& inputs,
                             const AttentionResult& global, const PackedSequences& sequences) const override {
    ++calls;
    const AttentionResult& given = own_lse_ ? flash_cuda().forward(inputs, sequences) : global;
    return flash_cuda().backward(grad_out, inputs, given, sequences);
  }

  mutable int64_t calls = 0, most_sequences = 0;

 private:
  int64_t max_sequences_;
  bool own_lse_;
};

Results run(const SequenceAttention& attention, const AttentionProblem& problem,
            const at::TensorOptions& options = at::kDouble) {
  const auto forward = [&](const auto&... arguments) {
    return varlen::tree_attention(attention, arguments...);
  };
  const auto backward = [&](const auto&... arguments) {
    return varlen::tree_attention_backward(attention, arguments...);
  };
  return testing::attention_results(forward, backward, problem, options);
}

Results run_reference(const AttentionProblem& problem, const at::TensorOptions& options = at::kDouble) {
  return testing::attention_results(&reference::tree_attention, problem, options);
}

TEST(TreeAttentionVarlen, EqualReferenceInRandomForests) {
  const FakeFlash fake;
  for (uint64_t seed = 0; seed < 420; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_attention_problem(seed, kShapes[seed % std::size(kShapes)]);
    const Results expected = run_reference(problem);
    ASSERT_LE(worst_error(run(flash_cpu(), problem), expected), 1e-12);
    ASSERT_LE(worst_error(run(flash_cuda(), problem), expected), 1e-12);
    ASSERT_LE(worst_error(run(WatchedFlash(1 + static_cast<int64_t>(seed) % 3), problem), expected), 1e-12);
  }
}

TEST(TreeAttentionVarlen, EqualReferenceInLargerForests) {
  const FakeFlash fake;
  for (uint64_t seed = 0; seed < 2 * testing::kNumForestShapes; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto forest = static_cast<ForestShape>(seed % testing::kNumForestShapes);
    const bool context = seed < testing::kNumForestShapes;
    const AttentionProblem problem =
        testing::large_attention_problem(seed, forest, 200, 60, context, {4, 2, 12});
    const Results expected = run_reference(problem);
    EXPECT_LE(worst_error(run(flash_cpu(), problem), expected), 1e-12);
    EXPECT_LE(worst_error(run(flash_cuda(), problem), expected), 1e-12);
  }
}

TEST(TreeAttentionVarlen, ErrorInLowPrecisionIsAtMostTwiceThatOfTheReference) {
  const FakeFlash fake;
  for (uint64_t seed = 0; seed < testing::kNumForestShapes; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem =
        rounded(testing::large_attention_problem(seed, static_cast<ForestShape>(seed), 300, 40, seed % 2 == 0,
                                                 {4, 2, 32}),
                at::kBFloat16);
    const Results exact = run_reference(problem), plain = run_reference(problem, at::kBFloat16);
    for (const SequenceAttention* attention : {&flash_cpu(), &flash_cuda()}) {
      const Results ours = run(*attention, problem, at::kBFloat16);
      for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(PooledErrors(ours, plain, exact).at_most_twice_the_plain());
    }
  }
}

TEST(TreeAttentionVarlen, AreOneCallPerLevel) {
  const FakeFlash fake;
  for (uint64_t seed = 0; seed < 70; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_attention_problem(seed);
    const auto levels = mask_blocks_by_level(problem.ends);
    const auto context_levels = context_blocks_by_level(problem.blocks, problem.segment_sizes,
                                                        static_cast<int64_t>(problem.ends.size()));
    size_t widest = 0;
    for (const auto& all : {levels, context_levels}) {
      for (const auto& level : all) widest = std::max(widest, level.size());
    }
    const WatchedFlash whole(1000), small(2);
    run(whole, problem);
    EXPECT_EQ(whole.calls, 2 * (levels.size() + context_levels.size()));
    EXPECT_EQ(whole.most_sequences, widest);
    run(small, problem);
    EXPECT_LE(small.most_sequences, 2);
  }
}

TEST(TreeAttentionVarlen, GiveTheLseOfAllKeys) {
  const FakeFlash fake;
  for (uint64_t seed = 0; seed < 70; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_attention_problem(seed);
    const at::Tensor expected = testing::lse_in_float64(problem);
    const auto arguments = testing::arguments_of(problem, problem.inputs);
    const at::Tensor lse = std::get<1>(varlen::tree_attention(flash_cuda(), arguments));
    EXPECT_LE(relative_error(lse, expected), 1e-13);
    EXPECT_EQ(lse.strides(), expected.strides());
  }
}

TEST(TreeAttentionVarlen, TakeStridedInputsAndNoTokens) {
  const FakeFlash fake;
  AttentionProblem problem = small_attention_problem(5);
  const Results expected = run_reference(problem);
  for (at::Tensor& input : problem.inputs) input = input.permute({2, 1, 0}).contiguous().permute({2, 1, 0});
  EXPECT_LE(worst_error(run(flash_cuda(), problem), expected), 1e-12);
  for (at::Tensor& input : problem.inputs) {  // contiguous, but not where the kernels want rows to begin
    const at::Tensor moved = at::empty({input.numel() + 1}, input.options()).slice(0, 1).view(input.sizes());
    input = moved.copy_(input);
  }
  EXPECT_LE(worst_error(run(flash_cuda(), problem), expected), 1e-12);

  AttentionProblem none;
  testing::draw_inputs(1, {}, none);
  const Results empty = run(flash_cuda(), none);
  for (const at::Tensor& result : empty) EXPECT_EQ(result.size(0), 0);
}

TEST(TreeAttentionVarlen, NegativeControlsAreNoticed) {
  const FakeFlash fake;
  const AttentionProblem problem =
      testing::large_attention_problem(6, ForestShape::kMixed, 100, 8, true, {4, 2, 8});
  const Results expected = run_reference(problem);
  const Results with_own_lse = run(WatchedFlash(1000, true), problem);
  EXPECT_LE(relative_error(with_own_lse[0], expected[0]), 1e-12);
  for (size_t i = 1; i < expected.size(); ++i) {  // a block's own lse makes its gradients wrong
    EXPECT_GT(relative_error(with_own_lse[i], expected[i]), 1e-3) << "result " << i;
  }
}

TEST(TreeAttentionVarlen, RefuseWhatIsNoForest) {
  AttentionProblem problem = small_attention_problem(2);
  problem.ends.back() += 1;
  EXPECT_THROW(run(flash_cpu(), problem), std::runtime_error);
}

}  // namespace
}  // namespace espalier
