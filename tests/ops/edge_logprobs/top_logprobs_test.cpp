// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/edge_logprobs/top_logprobs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "espalier/base/rng.h"
#include "espalier/ops/edge_logprobs/logit_blocks.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "tests/ops/comparison.h"
#include "tests/ops/edge_logprobs/edge_problems.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

/// The plainest way: log_softmax of all logits, sorted whole.
TopLogprobs by_sorting(const at::Tensor& logits, int64_t k) {
  const at::Tensor logprobs = at::log_softmax(logits, 1);
  const auto [values, ids] = logprobs.sort(/*stable=*/true, 1, /*descending=*/true);
  return {ids.narrow(1, 0, k), values.narrow(1, 0, k)};
}

TEST(TopLogprobs, AreTheLargestOfLogSoftmax) {
  constexpr int kProblems = 40;
  for (int i = 0; i < kProblems; ++i) {
    Rng rng(test_seed(i), 0x70B);
    const int64_t vocabulary = rng.below(4) == 0 ? rng.between(3000, 9000) : rng.between(1, 80);
    const EdgeProblem given(i, {rng.between(1, 30), 1, rng.between(1, 12), vocabulary});
    const int64_t k = rng.below(4) == 0 ? vocabulary : rng.between(1, std::min<int64_t>(vocabulary, 20));
    const double temperature = rng.below(2) == 0 ? 1 : 0.7;
    SCOPED_TRACE(::testing::Message() << "seed " << i << ": vocabulary " << vocabulary << ", k " << k);
    const double softcap = rng.below(2) == 0 ? 0 : 2.5;
    const TopLogprobs found = top_logprobs(given.hidden, given.weight, k, temperature, softcap);
    at::Tensor logits = given.hidden.mm(given.weight.t());
    if (softcap > 0) logits = (logits / softcap).tanh() * softcap;
    const TopLogprobs expected = by_sorting(logits / temperature, k);
    EXPECT_TRUE(found.ids.equal(expected.ids));
    EXPECT_LT((found.logprobs - expected.logprobs).abs().max().item<double>(), 1e-12);
  }
}

// More columns than one block has, and more rows than one block has.
TEST(TopLogprobs, AreTheSameOverAllBlocks) {
  const int64_t rows = 2048 + 3, columns = logit_block(rows, 1 << 20, 8).num_columns * 2 + 5;
  const EdgeProblem given(1, {rows, 1, 2, columns});
  const TopLogprobs found = top_logprobs(given.hidden, given.weight, 3, 1);
  const TopLogprobs expected = by_sorting(given.hidden.mm(given.weight.t()), 3);
  EXPECT_TRUE(found.ids.equal(expected.ids));
  EXPECT_LT((found.logprobs - expected.logprobs).abs().max().item<double>(), 1e-12);
}

// Rows of the head that are equal, as those of ids that no tokenizer has: the lowest ids win, also where the
// last place is among them. Products of whole numbers are exact, so that equal logits are so to the last bit.
TEST(TopLogprobs, TakeEqualLogitsByAscendingId) {
  EdgeProblem given(2, {5, 1, 4, 3000});
  const at::Tensor hidden = given.hidden.mul(8).round().abs(), weight = given.weight.mul(8).round();
  const at::Tensor places = at::arange(3000, at::kLong).mul(7).remainder(3000);  // each once
  weight.index_copy_(0, places.narrow(0, 0, 2900), weight.narrow(0, 7, 1).abs().mul(3).repeat({2900, 1}));
  for (const int64_t k : {1, 2, 10, 1500}) {
    const TopLogprobs found = top_logprobs(hidden, weight, k, 1);
    EXPECT_TRUE(found.ids.equal(by_sorting(hidden.mm(weight.t()), k).ids)) << k;
  }
}

TEST(TopLogprobs, InLowPrecisionAreAsExactAsLogSoftmax) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const EdgeProblem given(3, {300, 1, 64, 5000}, dtype);
    const at::Tensor hidden = given.hidden.to(dtype), weight = given.weight.to(dtype);
    const TopLogprobs found = top_logprobs(hidden, weight, 8, 1);
    EXPECT_EQ(found.logprobs.scalar_type(), at::kFloat);
    // Products of LibTorch round to bfloat16, where a machine takes them; all others do not.
    const at::ScalarType product = detail::rounds_products(hidden) ? dtype : at::kFloat;
    const TopLogprobs plain = by_sorting(hidden.to(product).mm(weight.to(product).t()).to(at::kFloat), 8);
    const TopLogprobs exact = by_sorting(given.hidden.mm(given.weight.t()), 8);
    EXPECT_TRUE(PooledErrors({found.logprobs}, {plain.logprobs}, {exact.logprobs}).at_most_twice_the_plain());
  }
}

TEST(TopLogprobs, RefuseWhatTheyCannotDo) {
  const at::Tensor hidden = at::ones({2, 3}), weight = at::ones({5, 3});
  EXPECT_THROW(top_logprobs(hidden, weight, 0, 1), c10::Error);
  EXPECT_THROW(top_logprobs(hidden, weight, 6, 1), c10::Error);
  EXPECT_THROW(top_logprobs(hidden, weight, 1, 0), c10::Error);
  EXPECT_THROW(top_logprobs(hidden, weight.to(at::kDouble), 1, 1), c10::Error);
  EXPECT_EQ(top_logprobs(hidden.narrow(0, 0, 0), weight, 2, 1).ids.size(0), 0);
}

}  // namespace
}  // namespace espalier::testing
