// SPDX-License-Identifier: Apache-2.0
// Attention to keys that lie outside the forest: context segments.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "espalier/ops/attention/mask_pieces.h"
#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/reference.h"
#include "tests/ops/attention/attention_problem.h"

namespace espalier {
namespace {

using testing::Results;
using testing::same_bits;
using testing::worst_error;
using Numbers = std::vector<int64_t>;

using Problem = testing::AttentionProblem;
using testing::pieces_tensor;
using testing::small_attention_problem;

using Attention = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 double, const AttentionContext&);

Results run(Attention attention, Problem problem, const Numbers& pieces, at::ScalarType dtype = at::kDouble) {
  problem.pieces = pieces;
  return testing::attention_results(attention, problem, dtype);
}

TEST(AttentionContext, EqualsReferenceInRandomForests) {
  int64_t with_context = 0;
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = small_attention_problem(seed);
    with_context += !problem.pieces.empty();
    ASSERT_LE(worst_error(run(tree_attention, problem, problem.pieces),
                          run(reference::tree_attention, problem, problem.pieces)),
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
      const Results exact = run(reference::tree_attention, problem, problem.pieces);
      const Results ours = run(tree_attention, problem, problem.pieces, dtype);
      const Results plain = run(reference::tree_attention, problem, problem.pieces, dtype);
      for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype);
      EXPECT_TRUE(testing::PooledErrors(ours, plain, exact).at_most_twice_the_plain());
    }
  }
}

TEST(AttentionContext, UnnamedKeysReachNobody) {
  Problem problem = small_attention_problem(3);
  problem.pieces = {0, 1, 2, 0, static_cast<int64_t>(problem.ends.size())};
  problem.segment_sizes[0] = 4;
  for (size_t s = 0; s < problem.segment_sizes.size(); ++s) {
    for (const size_t input : {3 + s, 3 + s + problem.segment_sizes.size()}) {
      problem.inputs[input] = at::randn({problem.segment_sizes[s], 2, 8}, at::kDouble);
    }
  }
  const Results before = run(tree_attention, problem, problem.pieces);
  for (size_t input = 3; input < problem.inputs.size(); ++input) {
    const bool named = input == 3 || input == 3 + problem.segment_sizes.size();
    const at::Tensor poison = at::full_like(problem.inputs[input], std::numeric_limits<double>::quiet_NaN());
    if (named) poison.slice(0, 1, 2).copy_(problem.inputs[input].slice(0, 1, 2));
    problem.inputs[input] = poison;
  }
  const Results after = run(tree_attention, problem, problem.pieces);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << "result " << i;
}

TEST(AttentionContext, IsDeterministicForAnyNumberOfThreads) {
  const Problem problem = small_attention_problem(12);
  const int num_threads = at::get_num_threads();
  at::set_num_threads(1);
  const Results one = run(tree_attention, problem, problem.pieces, at::kFloat);
  at::set_num_threads(2);
  const Results two = run(tree_attention, problem, problem.pieces, at::kFloat);
  at::set_num_threads(num_threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i], two[i])) << "result " << i;
}

TEST(AttentionContext, NegativeControlsAreNoticed) {
  int64_t tried = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const Problem problem = small_attention_problem(seed);
    const Results right = run(tree_attention, problem, problem.pieces);
    for (size_t piece = 0; piece < problem.pieces.size(); piece += 5) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << " piece " << piece / 5);
      ++tried;
      Numbers lost = problem.pieces;
      lost.erase(lost.begin() + static_cast<int64_t>(piece), lost.begin() + static_cast<int64_t>(piece) + 5);
      EXPECT_GT(worst_error(run(reference::tree_attention, problem, lost), right), 1e-6);
      if (problem.pieces[piece + 4] - problem.pieces[piece + 3] > 1) {
        Numbers shorter = problem.pieces;
        --shorter[piece + 4];  // one query sees nothing of it
        EXPECT_GT(worst_error(run(reference::tree_attention, problem, shorter), right), 1e-6);
      }
      Numbers more = problem.pieces;  // the segment's first key, which nobody sees
      more.insert(more.end(), {more[piece], 0, 1, more[piece + 3], more[piece + 4]});
      EXPECT_GT(worst_error(run(reference::tree_attention, problem, more), right), 1e-6);
    }
  }
  EXPECT_GT(tried, 50);
}

TEST(AttentionContext, LevelsShareNoRows) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Problem problem = small_attention_problem(seed);
    const auto tokens = static_cast<int64_t>(problem.ends.size());
    size_t pieces = 0;
    for (const auto& level : context_pieces_by_level(problem.pieces, problem.segment_sizes, tokens)) {
      std::vector<int> users(tokens);
      pieces += level.size();
      for (const Piece& piece : level) {
        for (int64_t row = piece.row_begin; row < piece.row_end; ++row) ASSERT_EQ(++users[row], 1);
      }
    }
    ASSERT_EQ(pieces * 5, problem.pieces.size());
  }
}

TEST(AttentionContext, RefusesPiecesThatAreNone) {
  const Numbers sizes{4, 6};
  const auto levels = [&](const Numbers& pieces) { return context_pieces_by_level(pieces, sizes, 10); };
  EXPECT_NO_THROW(levels({0, 0, 2, 0, 10, 0, 2, 4, 3, 5, 1, 0, 6, 5, 6}));
  const std::vector<Numbers> bad = {
      {2, 0, 1, 0, 1},                 // no such segment
      {-1, 0, 1, 0, 1},                //
      {0, 0, 5, 0, 1},                 // past the segment
      {0, 2, 2, 0, 1},                 // no keys
      {0, 0, 1, 3, 3},                 // no queries
      {0, 0, 1, 0, 11},                // past the queries
      {0, 0, 3, 0, 5, 0, 2, 4, 6, 8},  // a key twice
      {0, 0, 2, 0, 5, 1, 0, 2, 4, 8},  // overlapping queries
      {0, 0, 2, 0},                    // a number is missing
  };
  for (const Numbers& pieces : bad) EXPECT_THROW(levels(pieces), std::runtime_error);
}

TEST(AttentionContext, RefusesTensorsThatDoNotFit) {
  const at::Tensor q = at::randn({3, 4, 8}), k = at::randn({3, 2, 8}), ends = at::full({3}, 3, at::kInt);
  const at::Tensor piece = pieces_tensor({0, 0, 2, 0, 3}), segment = at::randn({2, 2, 8});
  const auto attend = [&](const AttentionContext& context) { tree_attention(q, k, k, ends, 1.0, context); };
  EXPECT_NO_THROW(attend({{segment}, {segment}, piece}));
  EXPECT_THROW(attend({{segment}, {}, piece}), c10::Error);
  EXPECT_THROW(attend({{segment}, {at::randn({3, 2, 8})}, piece}), c10::Error);
  EXPECT_THROW(attend({{at::randn({2, 1, 8})}, {at::randn({2, 1, 8})}, piece}), c10::Error);
  EXPECT_THROW(attend({{segment.to(at::kDouble)}, {segment.to(at::kDouble)}, piece}), c10::Error);
  EXPECT_THROW(attend({{segment}, {segment}, piece.to(at::kInt)}), c10::Error);
  EXPECT_THROW(attend({{segment}, {segment}, piece.t()}), c10::Error);
  EXPECT_THROW(attend({{}, {}, piece}), std::runtime_error);
}

}  // namespace
}  // namespace espalier
