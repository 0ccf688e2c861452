// SPDX-License-Identifier: Apache-2.0
// Attention to keys that lie outside the forest: context segments.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/ops/attention/arguments.h"
#include "espalier/ops/attention/tree_attention.h"
#include "tests/ops/attention/attention_problem.h"
#include "tests/ops/attention/reference.h"

namespace espalier {
namespace {

using testing::Results;
using testing::same_bits;
using testing::worst_error;
using Numbers = std::vector<int64_t>;

using Problem = testing::AttentionProblem;
using testing::blocks_tensor;
using testing::small_attention_problem;

using Attention = decltype(&tree_attention);

Results run(Attention attention, Problem problem, const Numbers& blocks, at::ScalarType dtype = at::kDouble) {
  problem.blocks = blocks;
  return testing::attention_results(attention, problem, dtype);
}

TEST(AttentionContext, EqualsReferenceInRandomForests) {
  int64_t with_context = 0;
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = small_attention_problem(seed);
    with_context += !problem.blocks.empty();
    ASSERT_LE(worst_error(run(tree_attention, problem, problem.blocks),
                          run(reference::tree_attention, problem, problem.blocks)),
              1e-12);
  }
  EXPECT_GT(with_context, 400);
}

TEST(AttentionContext, ErrorInLowPrecisionIsAtMostTwiceThatOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      SCOPED_TRACE(::testing::Message() << dtype << ", seed " << seed);
      const Problem problem = rounded(
          testing::large_attention_problem(seed, testing::ForestShape::kMixed, 200, 12, true, {}), dtype);
      const Results exact = run(reference::tree_attention, problem, problem.blocks);
      const Results ours = run(tree_attention, problem, problem.blocks, dtype);
      const Results plain = run(reference::tree_attention, problem, problem.blocks, dtype);
      for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype);
      EXPECT_TRUE(testing::PooledErrors(ours, plain, exact).at_most_twice_the_plain());
    }
  }
}

TEST(AttentionContext, UnnamedKeysReachNobody) {
  Problem problem = small_attention_problem(3);
  problem.blocks = {0, 1, 2, 0, static_cast<int64_t>(problem.ends.size())};
  problem.segment_sizes[0] = 4;
  for (size_t s = 0; s < problem.segment_sizes.size(); ++s) {
    for (const size_t input : {3 + s, 3 + s + problem.segment_sizes.size()}) {
      problem.inputs[input] = at::randn({problem.segment_sizes[s], 2, 8}, at::kDouble);
    }
  }
  const Results before = run(tree_attention, problem, problem.blocks);
  for (size_t input = 3; input < problem.inputs.size(); ++input) {
    const bool named = input == 3 || input == 3 + problem.segment_sizes.size();
    const at::Tensor poison = at::full_like(problem.inputs[input], std::numeric_limits<double>::quiet_NaN());
    if (named) poison.slice(0, 1, 2).copy_(problem.inputs[input].slice(0, 1, 2));
    problem.inputs[input] = poison;
  }
  const Results after = run(tree_attention, problem, problem.blocks);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << "result " << i;
}

TEST(AttentionContext, IsDeterministicForAnyNumberOfThreads) {
  const Problem problem = small_attention_problem(12);
  const int num_threads = at::get_num_threads();
  at::set_num_threads(1);
  const Results one = run(tree_attention, problem, problem.blocks, at::kFloat);
  at::set_num_threads(2);
  const Results two = run(tree_attention, problem, problem.blocks, at::kFloat);
  at::set_num_threads(num_threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i], two[i])) << "result " << i;
}

TEST(AttentionContext, NegativeControlsAreNoticed) {
  int64_t tried = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const Problem problem = small_attention_problem(seed);
    const Results right = run(tree_attention, problem, problem.blocks);
    for (size_t block = 0; block < problem.blocks.size(); block += 5) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << " block " << block / 5);
      ++tried;
      Numbers lost = problem.blocks;
      lost.erase(lost.begin() + static_cast<int64_t>(block), lost.begin() + static_cast<int64_t>(block) + 5);
      EXPECT_GT(worst_error(run(reference::tree_attention, problem, lost), right), 1e-6);
      if (problem.blocks[block + 4] - problem.blocks[block + 3] > 1) {
        Numbers shorter = problem.blocks;
        --shorter[block + 4];  // one query sees nothing of it
        EXPECT_GT(worst_error(run(reference::tree_attention, problem, shorter), right), 1e-6);
      }
      Numbers more = problem.blocks;  // the segment's first key, which nobody sees
      more.insert(more.end(), {more[block], 0, 1, more[block + 3], more[block + 4]});
      EXPECT_GT(worst_error(run(reference::tree_attention, problem, more), right), 1e-6);
    }
  }
  EXPECT_GT(tried, 50);
}

AttentionContext context_of(const Numbers& blocks, const Numbers& segment_sizes) {
  AttentionContext context;
  for (const int64_t size : segment_sizes) context.k.push_back(at::empty({size, 1, 1}));
  context.blocks = at::tensor(blocks, at::kLong).view({-1, 5});
  return context;
}

TEST(AttentionContext, OuterRangesOfQueriesComeFirst) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Problem problem = small_attention_problem(seed);
    const auto rectangles = detail::context_rectangles(context_of(problem.blocks, problem.segment_sizes),
                                                       static_cast<int64_t>(problem.ends.size()));
    ASSERT_EQ(rectangles.size() * 5, problem.blocks.size());
    for (size_t inner = 0; inner < rectangles.size(); ++inner) {
      for (size_t other = inner + 1; other < rectangles.size(); ++other) {
        const ContextRectangle &a = rectangles[inner], &b = rectangles[other];
        const bool is_inside = b.query_begin <= a.query_begin && a.query_end <= b.query_end;
        ASSERT_FALSE(is_inside && (a.query_end - a.query_begin) < (b.query_end - b.query_begin));
      }
    }
  }
}

TEST(AttentionContext, RefusesBlocksThatAreNone) {
  const auto rectangles = [&](const Numbers& blocks) {
    return detail::context_rectangles(context_of(blocks, {4, 6}), 10);
  };
  EXPECT_NO_THROW(rectangles({0, 0, 2, 0, 10, 0, 2, 4, 3, 5, 1, 0, 6, 5, 6}));
  const std::vector<Numbers> bad = {
      {2, 0, 1, 0, 1},                 // no such segment
      {-1, 0, 1, 0, 1},                //
      {0, 0, 5, 0, 1},                 // past the segment
      {0, int64_t{1} << 32, 2, 0, 1},  // not a number of a key
      {0, 2, 2, 0, 1},                 // no keys
      {0, 0, 1, 3, 3},                 // no queries
      {0, 0, 1, 0, 11},                // past the queries
      {0, 0, 3, 0, 5, 0, 2, 4, 6, 8},  // a key twice
      {0, 0, 2, 0, 5, 1, 0, 2, 4, 8},  // overlapping queries
  };
  for (const Numbers& blocks : bad) EXPECT_THROW(rectangles(blocks), InputError);
}

TEST(AttentionContext, RefusesTensorsThatDoNotFit) {
  const at::Tensor q = at::randn({3, 4, 8}), k = at::randn({3, 2, 8}), ends = at::full({3}, 3, at::kInt);
  const at::Tensor block = blocks_tensor({0, 0, 2, 0, 3}), segment = at::randn({2, 2, 8});
  const auto attend = [&](const AttentionContext& context) {
    tree_attention(q, k, k, {ends}, {1.0}, context);
  };
  EXPECT_NO_THROW(attend({{segment}, {segment}, block}));
  EXPECT_THROW(attend({{segment}, {}, block}), c10::Error);
  EXPECT_THROW(attend({{segment}, {at::randn({3, 2, 8})}, block}), c10::Error);
  EXPECT_THROW(attend({{at::randn({2, 1, 8})}, {at::randn({2, 1, 8})}, block}), c10::Error);
  EXPECT_THROW(attend({{segment.to(at::kDouble)}, {segment.to(at::kDouble)}, block}), c10::Error);
  EXPECT_THROW(attend({{segment}, {segment}, block.to(at::kInt)}), c10::Error);
  EXPECT_THROW(attend({{segment}, {segment}, block.t()}), c10::Error);
  EXPECT_THROW(attend({{}, {}, block}), std::runtime_error);
}

}  // namespace
}  // namespace espalier
