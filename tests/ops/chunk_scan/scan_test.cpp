// SPDX-License-Identifier: Apache-2.0
// What all recurrences with states are held to.
#include <gtest/gtest.h>

#include <array>

#include "tests/ops/chunk_scan/scan_problem.h"
#include "tests/ops/threads.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

template <class Scan>
class Scans : public ::testing::Test {};
using ScanTypes = ::testing::Types<GatedDelta, Ssm>;
TYPED_TEST_SUITE(Scans, ScanTypes);

TYPED_TEST(Scans, RandomForestsEqualTheReference) {
  for (int64_t seed = 0; seed < 1000; ++seed) {
    Rng rng(test_seed(seed), 0x6D1);
    // Gradients of a key of one number, which is 1 or -1, cancel to nothing, and those of A may in a single
    // head.
    const auto [groups, repeat] = std::array{std::pair(4, 1), std::pair(2, 2), std::pair(1, 4)}[rng.below(3)];
    ScanProblem<TypeParam> problem(rng, 7, 5, {groups, repeat, rng.between(2, 4), rng.between(1, 4)});
    TypeParam::exaggerate(rng, problem.inputs);
    const Results plain = problem.plain();
    ASSERT_LE(worst_error(problem.ours(), plain), 1e-12) << "seed " << seed;
    if (seed % 4 == 0) {
      ASSERT_LE(worst_error(problem.composed(), plain), 1e-12) << "seed " << seed;
    }
  }
}

TYPED_TEST(Scans, LongNodesEqualTheReference) {
  for (int64_t seed = 0; seed < 8; ++seed) {
    Rng rng(test_seed(seed), 0x6D2);
    ScanProblem<TypeParam> problem(rng, 4, 150, {1, 6, 8, 6});
    problem.chunk_size = detail::kChunkTokens;
    const Results plain = problem.plain();
    EXPECT_LE(worst_error(problem.ours(), plain), 1e-12) << "seed " << seed;
    EXPECT_LE(worst_error(problem.composed(), plain), 1e-12) << "seed " << seed;
  }
}

TYPED_TEST(Scans, LowPrecisionIsAsGoodAsThePlainForm) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    PooledErrors pool, composed;
    for (int64_t seed = 0; seed < 20; ++seed) {
      Rng rng(test_seed(seed), 0x6D3);
      ScanProblem<TypeParam> problem(rng, 5, 40, {2, 8, 8, 8});
      problem.chunk_size = detail::kChunkTokens;
      problem.round_to(dtype);
      const Results plain = problem.plain(dtype), exact = problem.plain();
      pool.add(problem.ours(dtype), plain, exact);
      composed.add(problem.composed(dtype), plain, exact);
    }
    EXPECT_TRUE(pool.at_most_twice_the_plain()) << dtype;
    EXPECT_TRUE(composed.at_most_twice_the_plain()) << dtype;
  }
}

TYPED_TEST(Scans, AStateThatDoesNotBranchIsCaught) {
  int64_t branching = 0;
  for (int64_t seed = 0; seed < 40; ++seed) {
    Rng rng(test_seed(seed), 0x6D4);
    ScanProblem<TypeParam> problem(rng, 7, 5, {1, 2, 3, 4});
    problem.inputs[TypeParam::kDecays].fill_(-0.1);
    if (problem.paths.chain().equal(problem.paths.prev_tensor())) continue;
    ++branching;
    EXPECT_GT(worst_error(problem.ours(at::kDouble, problem.paths.chain()), problem.plain()), 1e-4);
  }
  EXPECT_GT(branching, 10);
}

// A root of three tokens with two children.
TYPED_TEST(Scans, ALostGradientOfOneChildIsCaught) {
  Rng rng(test_seed(5), 0x6D5);
  const RandomPaths paths{.prev = {-1, 0, 1, 2, 3, 2, 5}, .ends = {2}, .num_contexts = 0};
  ScanProblem<TypeParam> problem(rng, paths, {1, 1, 3, 3});
  problem.inputs[TypeParam::kDecays].fill_(-0.1);
  const Results plain = problem.plain();
  EXPECT_LE(worst_error(problem.ours(), plain), 1e-12);
  // Of the root's tokens: results are out and states, then the gradients of the first three inputs, rows.
  const auto worst_of_root = [&](const Results& spoilt) {
    double worst = 0;
    for (size_t i = 1; i <= 3; ++i) {
      worst = std::max(worst, relative_error(spoilt[i].narrow(0, 0, 3), plain[i].narrow(0, 0, 3)));
    }
    return worst;
  };
  auto spoilt = problem;
  spoilt.grad_out = problem.grad_out.clone();
  spoilt.grad_out.narrow(0, 5, 2).zero_();  // what reaches the root through the second child is missing
  EXPECT_GT(worst_of_root(spoilt.ours()), 1e-4);
  spoilt = problem;
  spoilt.grad_states = at::zeros_like(problem.grad_states);
  EXPECT_GT(worst_of_root(spoilt.ours()), 1e-4);
}

TYPED_TEST(Scans, IsTheSameForAnyNumberOfThreads) {
  Rng rng(test_seed(3), 0x6D6);
  ScanProblem<TypeParam> problem(rng, 20, 90, {2, 2, 16, 24});
  problem.chunk_size = detail::kChunkTokens;
  const auto with_threads = [&](int count) {
    const Threads threads(count);
    return problem.ours(at::kFloat);
  };
  const Results one = with_threads(1);
  for (const int count : {2, 3, 8}) {
    const Results many = with_threads(count);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i], many[i])) << count << ", " << i;
  }
}

}  // namespace
}  // namespace espalier::testing
