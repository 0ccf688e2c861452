// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/causal_conv1d/causal_conv1d.h"

#include <gtest/gtest.h>

#include "tests/ops/causal_conv1d/reference.h"
#include "tests/ops/comparison.h"
#include "tests/ops/random_paths.h"
#include "tests/ops/threads.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

/// A random convolution. Its result is y and the tails at `ends`, in one row of numbers.
struct Problem {
  RandomPaths paths;
  bool silu, has_bias, has_tails;
  Tensors inputs;  // x, weight, bias, tails, as far as there are any; float64
  at::Tensor grad_out;

  Problem(Rng& rng, int64_t max_nodes, int64_t max_node_tokens, int64_t channels)
      : paths(random_paths(rng, max_nodes, max_node_tokens)),
        silu(rng.below(2) == 0),
        has_bias(rng.below(2) == 0),
        has_tails(paths.num_contexts > 0) {
    const int64_t taps = rng.between(1, kMostConvolutionTaps), tokens = paths.num_tokens();
    inputs = {at::randn({tokens, channels}, at::kDouble), at::randn({channels, taps}, at::kDouble)};
    if (has_bias) inputs.push_back(at::randn({channels}, at::kDouble));
    if (has_tails) inputs.push_back(at::randn({paths.num_contexts, taps - 1, channels}, at::kDouble));
    const auto num_ends = static_cast<int64_t>(paths.ends.size());
    grad_out = at::randn({(tokens + num_ends * (taps - 1)) * channels}, at::kDouble);
  }

  CausalConv1d given(const Tensors& in, const at::Tensor& prev) const {
    return {.x = in[0],
            .weight = in[1],
            .bias = has_bias ? in[2] : at::Tensor(),
            .prev = prev,
            .tails = has_tails ? in.back() : at::Tensor(),
            .silu = silu};
  }

  template <class Convolution, class TailsOf>
  Results run(const Convolution& convolution, const TailsOf& tails_of, at::ScalarType dtype,
              const at::Tensor& prev) const {
    return with_gradients(
        [&](const Tensors& in) {
          const CausalConv1d each = given(in, prev);
          return at::cat({convolution(each).flatten(), tails_of(each, paths.ends_tensor()).flatten()}) +
                 zero_of(in, dtype);
        },
        cast(inputs, dtype), grad_out.to(dtype));
  }
  Results ours(at::ScalarType dtype, const at::Tensor& prev) const {
    return run(causal_conv1d, causal_conv1d_tails, dtype, prev);
  }
  Results ours(at::ScalarType dtype = at::kDouble) const { return ours(dtype, paths.prev_tensor()); }
  Results plain(at::ScalarType dtype = at::kDouble) const {
    return run(reference::causal_conv1d, reference::causal_conv1d_tails, dtype, paths.prev_tensor());
  }
};

TEST(CausalConv1d, RandomForestsEqualTheReference) {
  for (int64_t seed = 0; seed < 1000; ++seed) {
    Rng rng(test_seed(seed), 0xC04);
    const Problem problem(rng, 7, 4, 2);
    ASSERT_LE(worst_error(problem.ours(), problem.plain()), 1e-12) << "seed " << seed;
  }
}

TEST(CausalConv1d, LowPrecisionIsAsGoodAsThePlainForm) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    PooledErrors pool;
    for (int64_t seed = 0; seed < 32; ++seed) {
      Rng rng(test_seed(seed), 0xC05);
      Problem problem(rng, 12, 9, 64);
      if (!problem.has_bias) continue;  // tails would stand in its place
      problem.inputs = cast(cast(problem.inputs, dtype), at::kDouble);
      problem.grad_out = problem.grad_out.to(dtype).to(at::kDouble);
      pool.add(problem.ours(dtype), problem.plain(dtype), problem.plain());
    }
    EXPECT_TRUE(pool.at_most_twice_the_plain()) << dtype;
  }
}

TEST(CausalConv1d, ReadingAcrossSiblingsIsCaught) {
  int64_t branching = 0;
  for (int64_t seed = 0; seed < 40; ++seed) {
    Rng rng(test_seed(seed), 0xC06);
    const Problem problem(rng, 7, 4, 2);
    if (problem.inputs[1].size(1) == 1 || problem.paths.chain().equal(problem.paths.prev_tensor())) continue;
    ++branching;
    EXPECT_GT(worst_error(problem.ours(at::kDouble, problem.paths.chain()), problem.plain()), 1e-4);
  }
  EXPECT_GT(branching, 10);
}

TEST(CausalConv1d, IsTheSameForAnyNumberOfThreads) {
  Rng rng(test_seed(3), 0xC07);
  const Problem problem(rng, 40, 60, 257);
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

TEST(CausalConv1d, RefusesWhatIsNotAsSaid) {
  const at::Tensor x = at::randn({3, 2}), weight = at::randn({2, 4});
  const at::Tensor prev = at::tensor({-1, 0, 1}, at::kInt);
  EXPECT_NO_THROW(causal_conv1d({.x = x, .weight = weight, .prev = prev}));
  EXPECT_ANY_THROW(causal_conv1d({.x = x, .weight = at::randn({2, 9}), .prev = prev}));
  EXPECT_ANY_THROW(causal_conv1d({.x = x, .weight = at::randn({3, 4}), .prev = prev}));
  EXPECT_ANY_THROW(causal_conv1d({.x = x, .weight = weight, .bias = at::randn({3}), .prev = prev}));
  EXPECT_ANY_THROW(causal_conv1d({.x = x, .weight = weight, .prev = prev, .tails = at::randn({1, 2, 2})}));
  for (const std::vector<int>& wrong : {std::vector{-1, 0}, {-1, 1, 1}, {-1, 0, 2}, {-2, 0, 1}}) {
    EXPECT_ANY_THROW(causal_conv1d({.x = x, .weight = weight, .prev = at::tensor(wrong, at::kInt)}));
  }
  EXPECT_ANY_THROW(causal_conv1d({.x = x, .weight = weight, .prev = prev.to(at::kLong)}));
  EXPECT_ANY_THROW(causal_conv1d_tails({.x = x, .weight = weight, .prev = prev}, at::tensor({3}, at::kLong)));
}

}  // namespace
}  // namespace espalier::testing
