// SPDX-License-Identifier: Apache-2.0
// Tree attention on many random forests, by the device's own choice of implementation: float64 is exact, in
// lower precision the error against float64 is at most twice that of the plain reference in the same dtype.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/ops/attention/tree_attention.h"
#include "tests/ops/attention/random_subtrees.h"
#include "tests/ops/attention/reference.h"
#include "tests/ops/comparison.h"
#include "tests/test_seed.h"

namespace espalier::testing::random_forests {

struct HeadShape {
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t head_dim;
};
inline constexpr HeadShape kHeads[] = {{4, 2, 64}, {2, 2, 128}, {8, 1, 64}, {4, 1, 128}, {2, 1, 256}};
inline constexpr at::ScalarType kDtypes[] = {at::kBFloat16, at::kFloat, at::kBFloat16, at::kDouble};

inline at::ScalarType dtype_of(uint64_t seed) {
  return kDtypes[seed / kNumForestShapes % std::size(kDtypes)];
}

struct Forest {
  at::Tensor subtree_end;
  std::vector<at::Tensor> inputs;  // q, k, v, in float64, rounded to `dtype`
  at::Tensor grad_out;
  at::ScalarType dtype;
  double scale;
};

/// Trees of one shape, until there are so many tokens.
inline std::vector<int32_t> draw_ends(std::mt19937_64& random, ForestShape shape, int max_node_tokens,
                                      size_t min_tokens) {
  std::vector<int32_t> ends;
  while (ends.size() < min_tokens) {
    const auto offset = static_cast<int32_t>(ends.size());
    for (const int32_t end : random_subtree_end(random, shape, 24, max_node_tokens))
      ends.push_back(end + offset);
  }
  return ends;
}

inline Forest draw(uint64_t seed, at::Device device, int max_node_tokens) {
  std::mt19937_64 random(test_seed(seed));
  const HeadShape& heads = kHeads[seed % std::size(kHeads)];
  Forest forest;
  forest.dtype = dtype_of(seed);
  // Errors of a few roundings say nothing: there the reference may be exact by luck.
  const size_t min_tokens = forest.dtype == at::kDouble ? 1 : 200;
  const std::vector<int32_t> ends =
      draw_ends(random, static_cast<ForestShape>(seed % kNumForestShapes), max_node_tokens, min_tokens);
  const auto generator = at::detail::createCPUGenerator(test_seed(seed));
  const auto normal = [&](int64_t num_heads) {
    return at::randn({static_cast<int64_t>(ends.size()), num_heads, heads.head_dim}, generator,
                     at::TensorOptions(at::kDouble))
        .to(forest.dtype)
        .to(at::TensorOptions(device).dtype(at::kDouble));
  };
  forest.subtree_end = at::tensor(ends, at::kInt).to(device);
  forest.inputs = {normal(heads.num_heads), normal(heads.num_key_heads), normal(heads.num_key_heads)};
  forest.grad_out = normal(heads.num_heads);
  forest.scale = 1 / std::sqrt(static_cast<double>(heads.head_dim));
  return forest;
}

using Attention = decltype(&tree_attention);

/// The output and the gradients of q, k and v.
inline Results run(Attention attention, const Forest& forest, at::ScalarType dtype) {
  const auto attend = [&](const std::vector<at::Tensor>& qkv) {
    return attention(qkv[0], qkv[1], qkv[2], {forest.subtree_end}, {forest.scale}, {});
  };
  return with_gradients(attend, cast(forest.inputs, dtype), forest.grad_out.to(dtype));
}

/// Float64 is exact, in lower precision errors are at most twice those of the reference
/// (tests/error_ratio.h).
inline ::testing::AssertionResult right(Attention attention, const Forest& forest) {
  const Results exact = run(reference::tree_attention, forest, at::kDouble);
  const Results ours = run(attention, forest, forest.dtype);
  if (forest.dtype == at::kDouble) {
    const double error = worst_error(ours, exact);
    if (error <= 1e-12) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "expected an error of at most 1e-12, received " << error;
  }
  const Results plain = run(reference::tree_attention, forest, forest.dtype);
  return PooledErrors(ours, plain, exact).at_most_twice_the_plain();
}

inline void expect_right(uint64_t seed, at::Device device, int max_node_tokens) {
  const Forest forest = draw(seed, device, max_node_tokens);
  ASSERT_TRUE(right(&tree_attention, forest))
      << "seed " << seed << ", " << forest.dtype << ", q " << forest.inputs[0].sizes();
}

}  // namespace espalier::testing::random_forests
