// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/tree_attention_forward.h"

#include <gtest/gtest.h>

#include "tests/ops/kernels/cuda/attention/attention_case.h"

namespace espalier {
namespace {

using namespace testing;
using cuda::ForwardParams;
using cuda::ForwardTiles;

/// Output and lse of the kernel; `change` may spoil what it is given.
template <class Element, int kDim>
AttentionValues run_forward(
    AttentionCase<Element>& c, uint64_t seed, ListedTiles* tiles = nullptr, EmulatedCounts* counts = nullptr,
    const std::function<void(ForwardParams&)>& change = [](ForwardParams&) {}) {
  using Tiles = ForwardTiles<Element, kDim>;
  const auto group = static_cast<int32_t>(c.heads / c.key_heads);
  const cuda::RowPacking packing = cuda::RowPacking::of(group);
  const EmulatedSchedule schedule(c.ends, c.rectangles, cuda::block_sizes<Tiles>(packing), seed);
  std::vector<cuda::KeySource> sources;
  for (size_t s = 0; s < c.k.size(); ++s) sources.push_back({c.k[s].data(), c.v[s].data()});
  HeadTensor<Element> out(c.tokens, c.heads, c.dim, seed);
  std::vector<float> lse(c.heads * c.tokens, NAN);
  ForwardParams params{schedule.schedule, sources.data(), c.q.data(), out.data(),
                       lse.data(),        packing,        group,      c.scale};
  change(params);
  const cuda::AttentionGrid grid = cuda::forward_grid(params, static_cast<int32_t>(c.key_heads));
  const EmulatedCounts counted =
      emulate({{grid.x, grid.y, grid.z}, Tiles::kThreads, Tiles::kSharedBytes, seed},
              [&] { cuda::attend_tile<Tiles>(params); });
  if (counts != nullptr) *counts = counted;
  if (tiles != nullptr) tiles->count(schedule.schedule);
  AttentionValues result;
  result.out = values(out);
  result.lse = Values(c.tokens, c.heads, 1);
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t h = 0; h < c.heads; ++h) *result.lse.row(t, h) = lse[h * c.tokens + t];
  }
  return result;
}

template <class Element>
double forward_ratio(const AttentionCase<Element>& c, const AttentionValues& got) {
  const auto exact = dense_attention<double, false>(c), dense = dense_attention<float, true>(c);
  return std::max(error_ratio(got.out, dense.out, exact.out, unit_roundoff<Element>()),
                  error_ratio(got.lse, dense.lse, exact.lse, kFloat32Roundoff));
}

template <class Kernel>
class TreeAttentionForwardTest : public ::testing::Test {};

template <class Element_, int kDim_>
struct Kernel {
  using Element = Element_;
  static constexpr int kDim = kDim_;
};
using Kernels = ::testing::Types<Kernel<BFloat16, 64>, Kernel<Float16, 64>, Kernel<BFloat16, 128>,
                                 Kernel<Float16, 128>, Kernel<BFloat16, 256>, Kernel<Float16, 256>>;
TYPED_TEST_SUITE(TreeAttentionForwardTest, Kernels);

TYPED_TEST(TreeAttentionForwardTest, MatchesDenseOnRandomForests) {
  using Element = typename TypeParam::Element;
  constexpr int kDim = TypeParam::kDim;
  ListedTiles tiles;
  const int groups[] = {1, 2, 4, 7, 9};  // of the last three heads at a time
  const uint64_t seeds = std::is_same_v<Element, BFloat16> && !kIsSanitized ? 14 : 7;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const int group = groups[seed % 5];
    CaseOptions options{.head_dim = kDim, .key_heads = seed % 4 == 0 ? 2 : 1, .group = group};
    options.ends = random_ends(seed, 12, seed % 2 == 0 ? 12 : 48 / group + 8);
    options.num_rectangles = static_cast<int>(seed % 3);
    AttentionCase<Element> c(options, seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(c.tokens) + " tokens");
    EmulatedCounts counts;
    const AttentionValues got = run_forward<Element, kDim>(c, seed, &tiles, &counts);
    EXPECT_LE(forward_ratio(c, got), 2);
    EXPECT_EQ(counts.matrix_accesses, counts.matrix_reads) << "bank conflicts";
  }
  EXPECT_TRUE(tiles.all_hit());
}

TYPED_TEST(TreeAttentionForwardTest, MatchesDenseAroundBlockSizes) {
  using Element = typename TypeParam::Element;
  for (const int tokens : {1, 63, 64, 65, 127, 129, 200}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    AttentionCase<Element> c({.head_dim = TypeParam::kDim, .ends = std::vector<int32_t>(tokens, tokens)},
                             tokens);
    EXPECT_LE(forward_ratio(c, run_forward<Element, TypeParam::kDim>(c, 1)), 2);
  }
}

TEST(TreeAttentionForwardOrder, NeighboursLeaveABranchBitwiseAsItWas) {
  Neighbours<BFloat16> c({.head_dim = 64, .group = 2});
  EXPECT_TRUE(
      c.left_alone(run_forward<BFloat16, 64>(c.before, 1).out, run_forward<BFloat16, 64>(c.after, 1).out));
}

TEST(TreeAttentionForwardOrder, SameBitsInAnyInterleaving) {
  AttentionCase<BFloat16> c({.head_dim = 64, .group = 2, .ends = random_ends(6, 12, 20), .num_rectangles = 2},
                            6);
  const AttentionValues first = run_forward<BFloat16, 64>(c, 1);
  for (uint64_t seed = 2; seed < 6; ++seed) {
    const AttentionValues again = run_forward<BFloat16, 64>(c, seed);
    EXPECT_EQ(again.out.numbers, first.out.numbers) << "seed " << seed;
    EXPECT_EQ(again.lse.numbers, first.lse.numbers) << "seed " << seed;
  }
}

TEST(TreeAttentionForwardOrder, NegativeControlsAreNoticed) {
  AttentionCase<BFloat16> c({.head_dim = 64, .ends = {9, 6, 6, 4, 6, 6, 9, 8, 9}, .num_rectangles = 1}, 1);
  EXPECT_LE(forward_ratio(c, run_forward<BFloat16, 64>(c, 1)), 2);
  AttentionCase<BFloat16> wrong = c;
  wrong.ends[3] = 5;  // token 4 sees token 3 too
  EXPECT_GT(forward_ratio(c, run_forward<BFloat16, 64>(wrong, 1)), 4);
  wrong = c;
  ++wrong.rectangles[0].query_begin;
  EXPECT_GT(forward_ratio(c, run_forward<BFloat16, 64>(wrong, 1)), 4);
  wrong = c;
  --wrong.rectangles[0].key_end;
  EXPECT_GT(forward_ratio(c, run_forward<BFloat16, 64>(wrong, 1)), 4);
}

}  // namespace
}  // namespace espalier
