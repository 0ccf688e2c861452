// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/attention/random_forests.h"

#include "tests/ops/attention/reference.h"

namespace espalier {
namespace {

using testing::random_forests::draw;
using testing::random_forests::expect_right;
using testing::random_forests::Forest;
using testing::random_forests::right;

TEST(RandomForests, TreeAttentionOnTheCpu) {
  for (uint64_t seed = 0; seed < 35; ++seed) expect_right(seed, at::kCPU, 12);
}

/// Wrong in one place: the last token of the first tree no longer sees the first one. In bfloat16 that may be
/// less than the reference's own rounding; there no other token sees it.
at::Tensor forgets(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ForestTokens& tokens,
                   const AttentionOptions& options, const AttentionContext&) {
  at::Tensor ends = tokens.subtree_end.clone();
  if (q.scalar_type() == at::kBFloat16) {
    ends[0].fill_(1);
  } else {
    ends[0].sub_(1);
  }
  return reference::tree_attention(q, k, v, {ends}, options);
}

TEST(RandomForests, WhatIsForgottenIsNoticed) {
  for (uint64_t seed = 1; seed < 29; ++seed) {
    const Forest forest = draw(seed, at::kCPU, 12);
    if (forest.subtree_end[0].item<int32_t>() < 2) continue;
    EXPECT_FALSE(right(&forgets, forest)) << "seed " << seed << ", " << forest.dtype;
  }
}

}  // namespace
}  // namespace espalier
