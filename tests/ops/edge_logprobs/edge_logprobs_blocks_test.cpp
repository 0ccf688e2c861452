// SPDX-License-Identifier: Apache-2.0
// edge_logprobs as GPUs run it, by blocks of logits: how it is cut, on the CPU.
#include "espalier/ops/edge_logprobs/blocks.h"

#include <gtest/gtest.h>

#include "espalier/ops/edge_logprobs/edge_logprobs.h"
#include "tests/ops/edge_logprobs/edge_problems.h"
#include "tests/ops/edge_logprobs/reference.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr LogitBlock kBlocks[] = {{1000, 1000}, {3, 1000}, {1000, 7}, {4, 5}, {2, 3}};

/// Forward and backward by blocks. Gradients: of weight in float32 (float64), or in the dtype of weight.
Results run_by_blocks(const EdgeProblem& given, at::ScalarType dtype, const LogitBlock& size,
                      bool head_grad_is_wide) {
  const at::Tensor hidden = given.hidden.to(dtype), weight = given.weight.to(dtype);
  const auto sums = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto [logprobs, lse] =
      detail::edge_logprobs_by_blocks(hidden, weight, given.edge_row, given.edge_target, size);
  EXPECT_EQ(logprobs.scalar_type(), sums);
  EXPECT_EQ(lse.scalar_type(), at::kDouble);
  const at::Tensor grad_hidden = at::zeros(hidden.sizes(), sums);
  const at::Tensor grad_weight = at::zeros(weight.sizes(), head_grad_is_wide ? sums : dtype);
  detail::add_edge_logprobs_gradients(
      {given.grad_out.to(sums), {hidden, weight, given.edge_row, given.edge_target}, lse}, grad_hidden,
      grad_weight, size);
  return {logprobs, grad_hidden.to(dtype), grad_weight.to(dtype)};
}

Results run_plain(const EdgeProblem& given, at::ScalarType dtype = at::kDouble) {
  return given.run(reference::edge_logprobs, dtype, at::kCPU);
}

TEST(EdgeLogprobsBlocks, EqualReferenceHoweverTheyAreCut) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(test_seed(seed));
    const auto between = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const EdgeProblem given(seed, {between(1, 20), between(1, 40), between(1, 16), between(1, 60)});
    const Results exact = run_plain(given);
    for (const LogitBlock& size : kBlocks) {
      SCOPED_TRACE(::testing::Message()
                   << "seed " << seed << ", " << size.num_rows << " x " << size.num_columns);
      EXPECT_LE(worst_error(run_by_blocks(given, at::kDouble, size, seed % 2 == 0), exact), 1e-12);
    }
  }
}

TEST(EdgeLogprobsBlocks, ErrorInLowPrecisionIsAtMostTwiceThatOfPlainLogSoftmax) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const LogitBlock& size : {LogitBlock{2000, 2000}, LogitBlock{64, 300}}) {
      const EdgeProblem given(51, {260, 500, 16, 700}, dtype);
      const Results exact = run_plain(given), plain = run_plain(given, dtype);
      const Results ours = run_by_blocks(given, dtype, size, false);
      EXPECT_TRUE(PooledErrors(ours, plain, exact).at_most_twice_the_plain()) << dtype;
    }
  }
}

// +-10,000 and a little, all of which float32 holds exactly: what is wrong comes from softmax alone.
TEST(EdgeLogprobsBlocks, ExtremeLogits) {
  constexpr int64_t kRows = 65;
  PooledErrors in_one_block, in_blocks;
  for (int64_t draw = 0; draw < draws_for(kRows); ++draw) {
    const EdgeProblem given = extreme_edge_problem(500 + draw, {kRows, 200, 5, 1023}, at::kFloat);
    const Results exact = run_plain(given), plain = run_plain(given, at::kFloat);
    in_one_block.add(run_by_blocks(given, at::kFloat, {2000, 2000}, true), plain, exact);
    in_blocks.add(run_by_blocks(given, at::kFloat, {64, 300}, true), plain, exact);
  }
  EXPECT_TRUE(in_one_block.at_most_twice_the_plain());
  EXPECT_TRUE(in_blocks.at_most_twice_the_plain());
}

TEST(EdgeLogprobsBlocks, AddToTheGradientThatIsThere) {
  const EdgeProblem given(53, {9, 20, 4, 30});
  const auto [logprobs, lse] =
      detail::edge_logprobs_by_blocks(given.hidden, given.weight, given.edge_row, given.edge_target, {4, 7});
  const at::Tensor sum = at::ones_like(given.weight);
  detail::add_edge_logprobs_gradients(
      {given.grad_out, {given.hidden, given.weight, given.edge_row, given.edge_target}, lse}, {}, sum,
      {4, 7});
  EXPECT_LE(relative_error(sum - 1, run_plain(given)[2]), 1e-12);
}

TEST(EdgeLogprobsBlocks, TakeNoEdgesAndNoRows) {
  for (const int64_t num_rows : {0, 3}) {
    const at::Tensor hidden = at::randn({num_rows, 4}), weight = at::randn({9, 4});
    const at::Tensor none = at::empty({0}, at::kLong);
    const auto [logprobs, lse] = detail::edge_logprobs_by_blocks(hidden, weight, none, none, {2, 4});
    EXPECT_EQ(logprobs.numel(), 0);
    EXPECT_EQ(lse.numel(), num_rows);
    const at::Tensor grad_hidden = at::ones_like(hidden), grad_weight = at::ones_like(weight);
    detail::add_edge_logprobs_gradients({logprobs, {hidden, weight, none, none}, lse}, grad_hidden,
                                        grad_weight, {2, 4});
    EXPECT_TRUE(grad_hidden.equal(at::ones_like(hidden)));
    EXPECT_TRUE(grad_weight.equal(at::ones_like(weight)));
  }
}

TEST(EdgeLogprobsBlocks, BlocksOfDevicesKeepTheMemoryLimit) {
  for (const int64_t bytes : {4, 8}) {
    for (const int64_t num_rows : {0, 1, 17, 4096, 4097, 32'768, 1'000'000}) {
      for (const int64_t vocabulary : {1, 50, 49'152, 151'936, 248'320, 300'000'000}) {
        const LogitBlock block = device_logit_block(num_rows, vocabulary, bytes);
        EXPECT_LE(block.num_rows * ((block.num_columns + 63) / 64 * 64) * bytes, kDeviceLogitBlockBytes);
        EXPECT_GE(block.num_rows, std::min<int64_t>(std::max<int64_t>(num_rows, 1), 2048));
        EXPECT_GE(block.num_columns, std::min<int64_t>(vocabulary, 8192));
        EXPECT_LE(block.num_columns, std::max<int64_t>(vocabulary, 256) + 255);
      }
    }
  }
}

}  // namespace
}  // namespace espalier::testing
