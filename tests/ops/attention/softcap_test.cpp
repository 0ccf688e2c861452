// SPDX-License-Identifier: Apache-2.0
// Tree attention with a softcap of the scores, and with values of another width than keys, on the CPU and by
// the implementation made of ATen's operators.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "espalier/ops/attention/cuda.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/attention/tree_attention.h"
#include "tests/ops/attention/attention_problem.h"
#include "tests/ops/attention/forced_attention.h"
#include "tests/ops/attention/reference.h"
#include "tests/ops/gemm/forced_products.h"
#include "tests/ops/kernels/cpu/forced_instruction_set.h"
#include "tests/ops/threads.h"

namespace espalier {
namespace {

using testing::attention_results;
using testing::AttentionProblem;
using testing::for_each_product_choice;
using testing::ForcedInstructionSet;
using testing::ForestShape;
using testing::HeadShape;
using testing::large_attention_problem;
using testing::PooledErrors;
using testing::Results;
using testing::run_masked;
using testing::run_reference;
using testing::same_bits;
using testing::small_attention_problem;
using testing::windowed;
using testing::with_sinks;
using testing::without_sinks;
using testing::worst_error;

// Scores are about 1, so that the first bends all of them and the last almost none.
constexpr double kCaps[] = {0.3, 1, 4, 50};
constexpr HeadShape kShapes[] = {{4, 2, 8, 5}, {4, 2, 8}, {2, 1, 5, 12}, {9, 3, 4, 1}, {3, 3, 1, 7}};

AttentionProblem capped(AttentionProblem problem, double softcap) {
  problem.softcap = softcap;
  return problem;
}

/// In turn with windows, sinks and softcaps, and without.
AttentionProblem small_problem(uint64_t seed) {
  AttentionProblem problem = small_attention_problem(seed, kShapes[seed % std::size(kShapes)]);
  if (seed % 5 != 4) problem.softcap = kCaps[seed % std::size(kCaps)];
  if (seed % 3 == 0) problem = windowed(std::move(problem), 1 + static_cast<int64_t>(seed % 13));
  return seed % 4 == 1 ? with_sinks(std::move(problem), seed) : problem;
}

Results run(const AttentionProblem& problem, const at::TensorOptions& options = at::kDouble) {
  return attention_results(&tree_attention, problem, options);
}

/// A chain of three tokens, one head, written out.
TEST(Softcap, ReferenceIsTheDefinition) {
  AttentionProblem problem =
      capped(large_attention_problem(3, ForestShape::kChain, 3, 3, /*context=*/false, {1, 1, 4, 3}), 0.6);
  const at::Tensor out = run_reference(problem)[0];
  const auto& in = problem.inputs;
  for (int64_t j = 0; j < in[0].size(0); ++j) {
    double sum = 0;
    at::Tensor row = at::zeros({3}, at::kDouble);
    for (int64_t i = 0; i < in[1].size(0); ++i) {
      if (!testing::visible(problem.ends, j, i)) continue;
      const double score = (in[0][j][0] * in[1][i][0]).sum().item<double>() * problem.scale;
      const double weight = std::exp(0.6 * std::tanh(score / 0.6));
      sum += weight;
      row += weight * in[2][i][0];
    }
    EXPECT_LE(testing::relative_error(out[j][0], row / sum), 1e-14);
  }
}

TEST(Softcap, EqualsReferenceInRandomForests) {
  for (uint64_t seed = 0; seed < 420; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_problem(seed);
    const Results expected = run_reference(problem);
    ASSERT_LE(worst_error(run(problem), expected), 1e-12);
    if (seed % 4 == 3) continue;
    const Results shared = without_sinks(problem, expected);
    ASSERT_LE(worst_error(run_masked(problem, 1), shared), 1e-12);  // a query at a time
    ASSERT_LE(worst_error(run_masked(problem, 1 << 13), shared), 1e-12);
  }
}

// Several blocks of queries and of keys.
TEST(Softcap, EqualsReferenceInLargerForests) {
  uint64_t seed = 0;
  for (const HeadShape& shape : {HeadShape{2, 1, 8, 3}, HeadShape{3, 3, 24, 80}, HeadShape{4, 2, 192, 128}}) {
    for (const int max_node_tokens : {1, 20, 200}) {
      SCOPED_TRACE(::testing::Message()
                   << "values of " << shape.value_dim << ", nodes up to " << max_node_tokens);
      const auto forest = static_cast<ForestShape>(++seed % testing::kNumForestShapes);
      AttentionProblem problem =
          large_attention_problem(seed, forest, 260, max_node_tokens, seed % 2 == 0, shape);
      problem.softcap = kCaps[seed % std::size(kCaps)];
      if (seed % 3 == 0) problem = windowed(std::move(problem), 70);
      const Results expected = run_reference(problem);
      EXPECT_LE(worst_error(run(problem), expected), 1e-12);
      EXPECT_LE(worst_error(run_masked(problem, 1 << 17), expected), 1e-12);
    }
  }
}

TEST(Softcap, GivesTheLseOfCappedScores) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_problem(seed);
    const auto arguments = testing::arguments_of(problem, problem.inputs);
    const at::Tensor expected = testing::lse_in_float64(problem);
    const at::Tensor lse = std::get<1>(masked_chunks::tree_attention(arguments, 1000));
    EXPECT_LE(testing::relative_error(lse, expected), 1e-13);
  }
}

// Scores that no softcap bends: with one of 1e9, what is left is rounding.
TEST(Softcap, ExtremeCaps) {
  const AttentionProblem plain =
      large_attention_problem(3, ForestShape::kMixed, 150, 20, /*context=*/true, {2, 1, 8, 5});
  EXPECT_LE(worst_error(run(capped(plain, 1e9)), run(plain)), 1e-12);
  // A tiny one leaves every visible key the same weight, and queries no gradient.
  const Results uniform = run(capped(plain, 1e-30));
  AttentionProblem zeros = plain;
  zeros.inputs[0] = at::zeros_like(zeros.inputs[0]);
  EXPECT_LE(testing::relative_error(uniform[0], run(zeros)[0]), 1e-14);
  EXPECT_LE(uniform[1].abs().max().item<double>(), 1e-28);
}

// Queries and keys of all sizes: scores far below the cap, around it, and far above, where tanh is 1 and its
// derivative 0.
TEST(Softcap, ErrorInLowPrecisionIsAtMostTwiceThatOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const double sharpness : {0.05, 1., 8.}) {
      PooledErrors masked;
      std::vector<AttentionProblem> problems;
      std::vector<Results> exact, plain;
      for (uint64_t seed = 0; seed < 2 * testing::kNumForestShapes; ++seed) {
        const auto forest = static_cast<ForestShape>(seed % testing::kNumForestShapes);
        AttentionProblem drawn =
            large_attention_problem(seed, forest, 120, seed % 2 == 0 ? 60 : 8, seed % 2 == 1, {4, 2, 32, 16});
        drawn.inputs[0] = drawn.inputs[0] * sharpness;
        problems.push_back(rounded(capped(std::move(drawn), 2), dtype));
        exact.push_back(run_reference(problems.back()));
        plain.push_back(run_reference(problems.back(), dtype));
        masked.add(run_masked(problems.back(), 100000, dtype), plain.back(), exact.back());
      }
      EXPECT_TRUE(masked.at_most_twice_the_plain()) << dtype << ", sharpness " << sharpness;
      for_each_product_choice([&] {
        PooledErrors errors;
        for (size_t i = 0; i < problems.size(); ++i) {
          const Results ours = run(problems[i], dtype);
          for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype);
          errors.add(ours, plain[i], exact[i]);
        }
        EXPECT_TRUE(errors.at_most_twice_the_plain()) << dtype << ", sharpness " << sharpness;
      });
    }
  }
}

TEST(Softcap, WorksAtEveryInstructionSetOfTheMachine) {
  const AttentionProblem problem =
      capped(large_attention_problem(7, ForestShape::kMixed, 300, 25, /*context=*/true, {6, 2, 48, 20}), 0.8);
  for (const char* name : {"default", "avx2", "avx512", "avx512_bf16"}) {
    const ForcedInstructionSet level(name);
    try {
      instruction_set();
    } catch (const std::runtime_error&) {
      continue;  // not on this machine
    }
    EXPECT_LE(worst_error(run(problem), run_reference(problem)), 1e-12) << name;
    for_each_product_choice([&] {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const AttentionProblem low = rounded(problem, dtype);
        PooledErrors errors;
        errors.add(run(low, dtype), run_reference(low, dtype), run_reference(low));
        EXPECT_TRUE(errors.at_most_twice_the_plain()) << name << ", " << dtype;
      }
    });
  }
}

TEST(Softcap, GivesTheSameBitsForAnyNumberOfThreads) {
  const AttentionProblem problem =
      capped(large_attention_problem(9, ForestShape::kMixed, 700, 60, /*context=*/true, {4, 2, 32, 24}), 1);
  const auto with_threads = [&](int count) {
    const testing::Threads threads(count);
    return run(problem, at::kFloat);
  };
  const Results one = with_threads(1);
  for (const int count : {2, 2, 5}) {
    const Results more = with_threads(count);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i], more[i])) << "result " << i;
  }
}

// A value, key or query that is not finite reaches who sees it, and nobody else.
TEST(Softcap, KeepsNonFiniteNumbersAmongThoseWhoSeeThem) {
  const AttentionProblem clean =
      capped(large_attention_problem(2, ForestShape::kStar, 120, 8, /*context=*/false, {4, 2, 16, 12}), 1);
  constexpr int64_t kToken = 60;
  std::vector<int64_t> unrelated;
  for (int64_t j = 0; j < static_cast<int64_t>(clean.ends.size()); ++j) {
    if (!testing::visible(clean.ends, j, kToken) && !testing::visible(clean.ends, kToken, j))
      unrelated.push_back(j);
  }
  ASSERT_GT(unrelated.size(), 20u);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const Results before = run(clean, dtype);
    for (size_t place = 0; place < 3; ++place) {
      AttentionProblem poisoned = clean;
      poisoned.inputs[place] = poisoned.inputs[place].clone();
      poisoned.inputs[place][kToken].fill_(std::numeric_limits<double>::quiet_NaN());
      const Results after = run(poisoned, dtype);
      for (size_t i = 0; i < before.size(); ++i) {
        for (const int64_t j : unrelated) {
          ASSERT_TRUE(same_bits(before[i][j], after[i][j]))
              << "place " << place << ", result " << i << ", token " << j;
        }
      }
      EXPECT_TRUE(after[0][kToken].isnan().any().item<bool>()) << "place " << place;
    }
  }
}

/// The reference with another derivative of the softcap: that of the identity.
at::Tensor without_derivative(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const ForestTokens& tokens, const AttentionOptions& options,
                              const AttentionContext&) {
  const int64_t group = q.size(1) / k.size(1);
  const auto by_head = [&](const at::Tensor& x) { return x.transpose(0, 1).repeat_interleave(group, 0); };
  at::Tensor scores = q.transpose(0, 1).matmul(by_head(k).transpose(1, 2)).mul(options.softmax_scale);
  const at::Tensor bent = scores.div(options.softcap).tanh().mul(options.softcap);
  scores = scores + (bent - scores).detach();
  const at::Tensor hidden = reference::visibility_mask(tokens.subtree_end).logical_not();
  return scores.masked_fill(hidden, -std::numeric_limits<double>::infinity())
      .softmax(-1)
      .matmul(by_head(v))
      .transpose(0, 1);
}

TEST(Softcap, NegativeControlsAreNoticed) {
  const AttentionProblem problem =
      capped(large_attention_problem(5, ForestShape::kMixed, 100, 20, /*context=*/false, {2, 1, 8, 5}), 1);
  const Results right = run(problem);
  EXPECT_LE(worst_error(right, run_reference(problem)), 1e-12);
  EXPECT_GT(testing::relative_error(run_reference(capped(problem, 0))[0], right[0]), 1e-3);  // left out
  EXPECT_GT(testing::relative_error(run_reference(capped(problem, 1.001))[0], right[0]), 1e-6);
  const Results straight = attention_results(&without_derivative, problem);
  EXPECT_LE(testing::relative_error(straight[0], right[0]), 1e-12);
  EXPECT_GT(testing::relative_error(straight[1], right[1]), 1e-3);
  EXPECT_GT(testing::relative_error(straight[2], right[2]), 1e-3);
  AttentionProblem swapped = problem;  // two columns of the values
  swapped.inputs[2] = swapped.inputs[2].index_select(2, at::tensor({1, 0, 2, 3, 4}, at::kLong));
  EXPECT_GT(worst_error(run_reference(swapped), right), 1e-3);
}

TEST(Softcap, RefusesWhatDoesNotFit) {
  const at::Tensor q = at::randn({4, 4, 8}), k = at::randn({4, 2, 8}), v = at::randn({4, 2, 5});
  const at::Tensor ends = at::full({4}, 4, at::kInt), blocks = testing::blocks_tensor({0, 0, 2, 0, 4});
  const auto attend = [&](double softcap, const at::Tensor& context_v) {
    tree_attention(q, k, v, {ends}, {.softcap = softcap}, {{at::randn({2, 2, 8})}, {context_v}, blocks});
  };
  const at::Tensor values = at::randn({2, 2, 5});
  EXPECT_NO_THROW(attend(0, values));
  EXPECT_NO_THROW(attend(1e-3, values));
  EXPECT_THROW(attend(0, at::randn({2, 2, 8})), c10::Error);
  EXPECT_THROW(attend(0, at::randn({1, 2, 5})), c10::Error);
  EXPECT_THROW(attend(-1, values), c10::Error);
  EXPECT_THROW(attend(std::numeric_limits<double>::infinity(), values), c10::Error);
  EXPECT_THROW(attend(std::numeric_limits<double>::quiet_NaN(), values), c10::Error);
}

TEST(Softcap, WhatServesItOnCuda) {
  const testing::ForcedAttention any(nullptr);
  EXPECT_EQ(attention_kind({.dtype = at::kBFloat16, .head_dim = 64, .softcap = true}),
            AttentionKind::kMasked);
  for (const char* name : {"ampere", "library"}) {
    const testing::ForcedAttention named(name);
    EXPECT_THROW(attention_kind({.dtype = at::kBFloat16, .head_dim = 64, .softcap = true}), c10::Error);
  }
}

}  // namespace
}  // namespace espalier
