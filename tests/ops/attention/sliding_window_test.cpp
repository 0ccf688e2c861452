// SPDX-License-Identifier: Apache-2.0
// Tree attention with a sliding window, and with sinks, on the CPU and by the implementations made of ATen's
// operators.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/ops/attention/cuda.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/attention/tree_attention.h"
#include "tests/ops/attention/attention_problem.h"
#include "tests/ops/attention/forced_attention.h"

namespace espalier {
namespace {

using testing::attention_results;
using testing::AttentionProblem;
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

constexpr int64_t kWindows[] = {1, 2, 3, 5, 9, 15, 16, 17, 1000};

/// Windows and sinks in turn: every third problem has no sinks, every fourth no window.
AttentionProblem small_problem(uint64_t seed) {
  AttentionProblem problem = small_attention_problem(seed);
  if (seed % 4 != 3) problem = windowed(std::move(problem), kWindows[seed % std::size(kWindows)]);
  return seed % 3 == 0 ? problem : with_sinks(std::move(problem), seed);
}

Results run(const AttentionProblem& problem, const at::TensorOptions& options = at::kDouble) {
  return attention_results(&tree_attention, problem, options);
}

/// The forward pass written out: one query, one head, one key after the other.
at::Tensor token_by_token(const AttentionProblem& problem) {
  const at::Tensor out = at::zeros_like(problem.inputs[0]);
  const auto heads = out.size(1), group = heads / problem.inputs[1].size(1);
  const size_t segments = problem.segment_sizes.size();
  for (int64_t j = 0; j < out.size(0); ++j) {
    for (int64_t h = 0; h < heads; ++h) {
      const at::Tensor q = problem.inputs[0][j][h];
      double sum = problem.has_sinks ? std::exp(problem.inputs.back()[h].item<double>()) : 0;
      const auto add = [&](size_t k, size_t v, int64_t key, int64_t position) {
        if (problem.sliding_window > 0 && problem.positions[j] - position >= problem.sliding_window) return;
        const at::Tensor score = (q * problem.inputs[k][key][h / group]).sum() * problem.scale;
        const double weight = std::exp(score.item<double>());
        sum += weight;
        out[j][h] += weight * problem.inputs[v][key][h / group];
      };
      for (size_t b = 0; b < problem.blocks.size() / 5; ++b) {
        const int64_t* number = problem.blocks.data() + 5 * b;
        if (j < number[3] || number[4] <= j) continue;
        for (int64_t key = number[1]; key < number[2]; ++key) {
          const int64_t first = problem.block_positions.empty() ? 0 : problem.block_positions[b];
          add(3 + number[0], 3 + segments + number[0], key, first + key - number[1]);
        }
      }
      for (int64_t i = 0; i <= j; ++i) {
        if (testing::visible(problem.ends, j, i))
          add(1, 2, i, problem.positions.empty() ? 0 : problem.positions[i]);
      }
      out[j][h] /= sum;
    }
  }
  return out;
}

TEST(SlidingWindow, ReferenceIsTheDefinition) {
  for (uint64_t seed = 0; seed < 21; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_problem(seed);
    EXPECT_LE(testing::relative_error(run_reference(problem)[0], token_by_token(problem)), 1e-13);
  }
}

TEST(SlidingWindow, EqualsReferenceInRandomForests) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionProblem problem = small_problem(seed);
    const Results expected = run_reference(problem);
    ASSERT_LE(worst_error(run(problem), expected), 1e-12);
    if (seed % 4 != 0) continue;
    const Results shared = without_sinks(problem, expected);
    ASSERT_LE(worst_error(run_masked(problem, 1), shared), 1e-12);  // a query at a time
    ASSERT_LE(worst_error(run_masked(problem, 1 << 13), shared), 1e-12);
  }
}

// Several blocks of queries and of keys, with windows around their sizes.
TEST(SlidingWindow, EqualsReferenceInLargerForests) {
  const int64_t windows[] = {1, 2, 31, 63, 64, 65, 127, 128, 200, 100000};
  uint64_t seed = 0;
  for (const int64_t window : windows) {
    for (const int max_node_tokens : {2, 20, 200}) {
      SCOPED_TRACE(::testing::Message() << "window " << window << ", nodes up to " << max_node_tokens);
      const auto forest = static_cast<ForestShape>(++seed % testing::kNumForestShapes);
      const AttentionProblem problem = with_sinks(
          windowed(large_attention_problem(seed, forest, 260, max_node_tokens, seed % 2 == 0, {2, 1, 8}),
                   window),
          seed);
      const Results expected = run_reference(problem);
      EXPECT_LE(worst_error(run(problem), expected), 1e-12);
      EXPECT_LE(worst_error(run_masked(problem, 1 << 17), without_sinks(problem, expected)), 1e-12);
    }
  }
}

// A window as long as the longest path changes no bit, and a window of 1 leaves the token itself.
TEST(SlidingWindow, ExtremeWindows) {
  const AttentionProblem plain =
      large_attention_problem(3, ForestShape::kMixed, 150, 20, /*context=*/true, {2, 1, 8});
  const Results all = run(windowed(plain, 100000)), none = run(plain);
  for (size_t i = 0; i < none.size(); ++i) EXPECT_TRUE(same_bits(all[i], none[i])) << "result " << i;
  const at::Tensor own = run(windowed(plain, 1))[0];
  EXPECT_LE(testing::relative_error(own, plain.inputs[2].repeat_interleave(2, 1)), 1e-15);
}

TEST(SlidingWindow, IsDeterministicForAnyNumberOfThreads) {
  const AttentionProblem problem =
      with_sinks(windowed(large_attention_problem(9, ForestShape::kMixed, 700, 60, true, {4, 2, 32}), 40), 9);
  const int num_threads = at::get_num_threads();
  at::set_num_threads(1);
  const Results one = run(problem, at::kFloat);
  at::set_num_threads(2);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Results two = run(problem, at::kFloat);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i], two[i])) << "result " << i;
  }
  at::set_num_threads(num_threads);
}

TEST(SlidingWindow, ErrorInLowPrecisionIsAtMostTwiceThatOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    PooledErrors errors;
    for (uint64_t seed = 0; seed < 72; ++seed) {  // so many that gradients of 4 sinks can be judged
      SCOPED_TRACE(::testing::Message() << dtype << ", seed " << seed);
      const auto forest = static_cast<ForestShape>(seed % testing::kNumForestShapes);
      const AttentionProblem problem = rounded(
          with_sinks(
              windowed(large_attention_problem(seed, forest, 80, 12, false, {4, 2, 16}), 1 + seed % 20),
              seed),
          dtype);
      const Results ours = run(problem, dtype);
      for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype);
      errors.add(ours, run_reference(problem, dtype), run_reference(problem));
    }
    EXPECT_TRUE(errors.at_most_twice_the_plain()) << dtype;
  }
}

// As models hand them over, so that their gradients add up in it.
TEST(SlidingWindow, SinksInTheDtypeOfSumsAreTheSameSinks) {
  const AttentionProblem problem = rounded(
      with_sinks(large_attention_problem(3, ForestShape::kMixed, 90, 12, /*context=*/true, {4, 2, 16}), 3),
      at::kBFloat16);
  const auto results = [&](at::ScalarType dtype_of_sinks) {
    const auto attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const ForestTokens& tokens, const AttentionOptions& options,
                            const AttentionContext& context) {
      AttentionOptions with_sinks = options;
      with_sinks.sinks = options.sinks.to(dtype_of_sinks);
      return tree_attention(q, k, v, tokens, with_sinks, context);
    };
    return testing::attention_results(attend, problem, at::kBFloat16);
  };
  const Results same = results(at::kBFloat16), wide = results(at::kFloat);
  for (size_t i = 0; i + 1 < same.size(); ++i) EXPECT_TRUE(same_bits(same[i], wide[i])) << "result " << i;
  EXPECT_LE(testing::relative_error(wide.back(), same.back()), 0x1p-8);  // rounded once more
}

TEST(SlidingWindow, NegativeControlsAreNoticed) {
  const AttentionProblem problem = with_sinks(
      windowed(large_attention_problem(5, ForestShape::kMixed, 100, 20, /*context=*/true, {2, 1, 8}), 12), 5);
  const Results right = run(problem);
  EXPECT_LE(worst_error(right, run_reference(problem)), 1e-12);
  const auto error_of = [&](const auto& change) {
    AttentionProblem wrong = problem;
    change(wrong);
    return worst_error(run_reference(wrong), right);
  };
  EXPECT_GT(error_of([](AttentionProblem& p) { ++p.sliding_window; }), 1e-3);  // one too many
  EXPECT_GT(error_of([](AttentionProblem& p) { --p.sliding_window; }), 1e-3);
  EXPECT_GT(error_of([](AttentionProblem& p) { p.sliding_window = 0; }), 1e-3);
  EXPECT_GT(error_of([](AttentionProblem& p) {
              for (int32_t& position : p.positions) position *= 2;
            }),
            1e-6);
  EXPECT_GT(error_of([](AttentionProblem& p) {
              for (int64_t& position : p.block_positions) position += 1000;  // in every window
            }),
            1e-6);
  EXPECT_GT(error_of([](AttentionProblem& p) { p.inputs.back() = p.inputs.back() + 1e-3; }), 1e-6);
  const auto without = [](AttentionProblem p) {
    p.has_sinks = false;
    p.inputs.pop_back();
    return p;
  };
  EXPECT_GT(testing::relative_error(run_reference(without(problem))[0], right[0]), 1e-3);
}

TEST(SlidingWindow, RefusesWhatDoesNotFit) {
  const at::Tensor q = at::randn({4, 4, 8}), k = at::randn({4, 2, 8}), ends = at::full({4}, 4, at::kInt);
  const at::Tensor position = at::arange(4, at::kInt);
  const auto attend = [&](const at::Tensor& given, const AttentionOptions& options,
                          const AttentionContext& context) {
    tree_attention(q, k, k, {ends, given}, options, context);
  };
  const AttentionOptions window{.sliding_window = 2};
  EXPECT_NO_THROW(attend(position, window, {}));
  EXPECT_NO_THROW(attend({}, {}, {}));
  EXPECT_THROW(attend(position, {.sliding_window = -1}, {}), c10::Error);
  EXPECT_THROW(attend({}, window, {}), c10::Error);
  EXPECT_THROW(attend(position.to(at::kLong), window, {}), c10::Error);
  EXPECT_THROW(attend(position.slice(0, 1), window, {}), c10::Error);
  const at::Tensor blocks = testing::blocks_tensor({0, 0, 2, 0, 4}), segment = at::randn({2, 2, 8});
  EXPECT_NO_THROW(attend(position, window, {{segment}, {segment}, blocks, at::zeros({1}, at::kLong)}));
  EXPECT_THROW(attend(position, window, {{segment}, {segment}, blocks}), c10::Error);
  EXPECT_THROW(attend(position, window, {{segment}, {segment}, blocks, at::zeros({2}, at::kLong)}),
               c10::Error);
  EXPECT_THROW(attend(position, window, {{segment}, {segment}, blocks, at::zeros({1}, at::kInt)}),
               c10::Error);
  EXPECT_NO_THROW(attend({}, {.sinks = at::randn({4})}, {}));
  EXPECT_THROW(attend({}, {.sinks = at::randn({2})}, {}), c10::Error);
  EXPECT_THROW(attend({}, {.sinks = at::randn({4}, at::kDouble)}, {}), c10::Error);
  EXPECT_THROW(attend({}, {.sinks = at::randn({4}, at::kBFloat16)}, {}), c10::Error);
}

TEST(SlidingWindow, WhatServesItOnCuda) {
  const testing::ForcedAttention any(nullptr);
  EXPECT_EQ(attention_kind({at::kBFloat16, 64, /*sliding_window=*/true}), AttentionKind::kMasked);
  EXPECT_EQ(attention_kind({at::kBFloat16, 64, false, /*sinks=*/true}), AttentionKind::kMasked);
  EXPECT_EQ(attention_kind({at::kFloat, 64, true, true}), AttentionKind::kMasked);
  const testing::ForcedAttention ampere("ampere");
  EXPECT_THROW(attention_kind({at::kBFloat16, 64, true}), c10::Error);
}

}  // namespace
}  // namespace espalier
