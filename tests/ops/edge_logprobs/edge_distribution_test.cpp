// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/edge_logprobs/edge_distribution.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "espalier/ops/edge_logprobs/edge_logprobs.h"
#include "espalier/ops/edge_logprobs/logit_blocks.h"
#include "espalier/runtime/tensor_memory.h"
#include "tests/ops/edge_logprobs/edge_problems.h"
#include "tests/ops/edge_logprobs/reference.h"
#include "tests/ops/gemm/forced_products.h"

namespace espalier::testing {
namespace {

using Distribute = EdgeDistribution (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                        const at::Tensor&, const LogitTransform&);

/// A problem with a bias and temperatures, in float64, of numbers that `dtype` holds.
struct DistributionProblem {
  EdgeProblem edges;
  at::Tensor bias, edge_temperature, grad_out;
  LogitTransform transform;  // without tensors
  bool has_bias, has_edge_temperature;

  /// The bits of `which`: bias, temperatures of edges, a temperature, a scale, a softcap.
  DistributionProblem(uint64_t seed, const EdgeSizes& sizes, unsigned which,
                      at::ScalarType dtype = at::kDouble)
      : edges(seed, sizes, dtype), has_bias(which & 1), has_edge_temperature(which & 2) {
    const auto generator = at::detail::createCPUGenerator(test_seed(seed + 1));
    const auto options = at::TensorOptions(at::kDouble);
    const auto sums = dtype == at::kDouble ? at::kDouble : at::kFloat;
    bias = at::randn({sizes.vocabulary}, generator, options).to(dtype).to(at::kDouble);
    edge_temperature = at::rand({sizes.num_edges}, generator, options).add(0.5).to(sums).to(at::kDouble);
    grad_out = at::randn({2 * sizes.num_edges}, generator, options).to(sums).to(at::kDouble);
    if (which & 4) transform.temperature = 0.75;
    if (which & 8) transform.logit_scale = 0.5;
    if (which & 16) transform.softcap = 3;
  }

  /// Log-probabilities and entropies in one row, and the gradients of hidden, weight and bias.
  Results run(Distribute distribute, at::ScalarType dtype = at::kDouble) const {
    const auto sums = dtype == at::kDouble ? at::kDouble : at::kFloat;
    const auto function = [&](const std::vector<at::Tensor>& in) {
      LogitTransform given = transform;
      if (has_bias) given.bias = in[2];
      if (has_edge_temperature) given.edge_temperature = edge_temperature.to(sums);
      const EdgeDistribution result = distribute(in[0], in[1], edges.edge_row, edges.edge_target, given);
      EXPECT_EQ(result.entropy.scalar_type(), sums);
      return at::cat({result.logprobs, result.entropy});
    };
    std::vector<at::Tensor> inputs{edges.hidden, edges.weight};
    if (has_bias) inputs.push_back(bias);
    return with_gradients(function, cast(inputs, dtype), grad_out.to(sums));
  }
};

TEST(EdgeDistribution, EqualReferenceWithEveryChoiceOfOptions) {
  for (unsigned which = 0; which < 32; ++which) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      SCOPED_TRACE(::testing::Message() << "options " << which << ", seed " << seed);
      const auto size = static_cast<int64_t>(seed);
      const DistributionProblem given(100 * which + seed,
                                      {1 + 5 * size, 1 + 9 * size, 1 + 3 * size, 2 + 17 * size}, which);
      ASSERT_LE(worst_error(given.run(edge_distribution), given.run(reference::edge_distribution)), 1e-12);
    }
  }
}

TEST(EdgeDistribution, EqualReferenceAcrossBlocks) {
  const EdgeSizes sizes{1500, 2060, 4, 1100};
  const LogitBlock block = logit_block(sizes.num_edges, sizes.vocabulary, 8);
  ASSERT_LT(block.num_rows, sizes.num_edges);
  ASSERT_LT(block.num_columns, sizes.vocabulary);
  const DistributionProblem given(7, sizes, 31);
  EXPECT_LE(worst_error(given.run(edge_distribution), given.run(reference::edge_distribution)), 1e-12);
}

/// Log-probabilities and entropies as separate results.
Results apart(Results results) {
  const std::vector<at::Tensor> halves = results[0].chunk(2);
  results[0] = halves[0];
  results.insert(results.begin() + 1, halves[1]);
  return results;
}

TEST(EdgeDistribution, ErrorInLowPrecisionIsAtMostTwiceThatOfThePlainForm) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const unsigned which : {0U, 1U, 14U, 31U}) {
      SCOPED_TRACE(::testing::Message() << dtype << ", options " << which);
      // Products of few rows: over many, our panels add up in another order than the library.
      DistributionProblem given(500 + which, {256, 256, 16, 700}, which, dtype);
      // An edge for each row: the plain form would add those of one row up before the products, in fewer
      // sums.
      given.edges.edge_row = at::arange(256, at::kLong);
      const Results exact = apart(given.run(reference::edge_distribution));
      const Results plain = apart(given.run(reference::edge_distribution, dtype));
      for_each_product_choice([&] {
        const Results ours = apart(given.run(edge_distribution, dtype));
        EXPECT_TRUE(PooledErrors(ours, plain, exact).at_most_twice_the_plain());
      });
    }
  }
}

TEST(EdgeDistribution, WithoutOptionsIsEdgeLogprobs) {
  const DistributionProblem given(11, {30, 50, 8, 90}, 0);
  const EdgeDistribution ours = edge_distribution(given.edges.hidden, given.edges.weight,
                                                  given.edges.edge_row, given.edges.edge_target, {});
  const at::Tensor plain =
      edge_logprobs(given.edges.hidden, given.edges.weight, given.edges.edge_row, given.edges.edge_target);
  EXPECT_LE(relative_error(ours.logprobs, plain), 1e-12);
}

TEST(EdgeDistribution, GiveEachGradientAlone) {
  const DistributionProblem given(13, {20, 30, 6, 50}, 31);
  const Results all = given.run(edge_distribution);
  DistributionProblem first = given, second = given;
  first.grad_out = given.grad_out.clone();
  first.grad_out.slice(0, 30).zero_();
  second.grad_out = given.grad_out - first.grad_out;
  const Results of_logprobs = first.run(edge_distribution), of_entropy = second.run(edge_distribution);
  for (size_t i = 1; i < all.size(); ++i)
    EXPECT_LE(relative_error(of_logprobs[i] + of_entropy[i], all[i]), 1e-12) << i;
  const at::Tensor hidden = given.edges.hidden.detach().requires_grad_();
  const auto entropy_alone = [&](Distribute distribute) {
    const at::Tensor entropy =
        distribute(hidden, given.edges.weight, given.edges.edge_row, given.edges.edge_target, {}).entropy;
    return torch::autograd::grad({entropy.sum()}, {hidden});
  };
  EXPECT_LE(worst_error(entropy_alone(edge_distribution), entropy_alone(reference::edge_distribution)),
            1e-12);
}

TEST(EdgeDistribution, LeaveOutEntriesOfTheVocabularyWhoseBiasIsMinusInfinity) {
  const DistributionProblem given(17, {20, 30, 6, 50}, 1);
  DistributionProblem masked = given;
  masked.bias = given.bias.clone();
  masked.bias.slice(0, 0, 10).fill_(-std::numeric_limits<double>::infinity());
  masked.edges.edge_target = given.edges.edge_target.remainder(40).add(10);
  DistributionProblem shorter = masked;
  shorter.bias = masked.bias.slice(0, 10);
  shorter.edges.weight = masked.edges.weight.slice(0, 10);
  shorter.edges.edge_target = masked.edges.edge_target - 10;
  const Results ours = masked.run(edge_distribution), exact = shorter.run(edge_distribution);
  EXPECT_LE(relative_error(ours[0], exact[0]), 1e-12);
  EXPECT_LE(relative_error(ours[1], exact[1]), 1e-12);
  EXPECT_LE(relative_error(ours[2].slice(0, 10), exact[2]), 1e-12);
}

// A distribution of one entry, and one of equal ones.
TEST(EdgeDistribution, EntropiesAtBothEnds) {
  const at::Tensor row = at::arange(2, at::kLong), weight = at::eye(64);
  const at::Tensor hidden = at::zeros({2, 64});
  hidden.select(0, 0).slice(0, 0, 1).fill_(1000);
  const EdgeDistribution result = edge_distribution(hidden, weight, row, at::zeros({2}, at::kLong), {});
  EXPECT_EQ(result.entropy[0].item<double>(), 0);
  EXPECT_EQ(result.logprobs[0].item<double>(), 0);
  EXPECT_NEAR(result.entropy[1].item<double>(), std::log(64), 1e-6);
}

TEST(EdgeDistribution, TakeNoEdges) {
  const at::Tensor none = at::empty({0}, at::kLong), weight = at::randn({5, 4}).requires_grad_();
  const EdgeDistribution result = edge_distribution(at::randn({0, 4}), weight, none, none, {});
  EXPECT_EQ(result.logprobs.numel(), 0);
  EXPECT_TRUE(torch::autograd::grad({result.entropy.sum()}, {weight})[0].equal(at::zeros({5, 4})));
}

TEST(EdgeDistribution, ExtraMemoryDoesNotGrowWithTheVocabulary) {
  count_tensor_memory();
  const auto extra_bytes = [](int64_t vocabulary) {
    const EdgeProblem given(19, {2048, 2048, 2, vocabulary}, at::kFloat);
    const at::Tensor hidden = given.hidden.to(at::kFloat).requires_grad_(),
                     weight = given.weight.to(at::kFloat);
    const int64_t before = tensor_memory();
    reset_peak_tensor_memory();
    const EdgeDistribution result =
        edge_distribution(hidden, weight, given.edge_row, given.edge_target, {.softcap = 5});
    torch::autograd::grad({result.logprobs.sum() + result.entropy.sum()}, {hidden});
    return peak_tensor_memory() - before;
  };
  for (const int64_t vocabulary : {4096, 16'384}) {
    EXPECT_GT(extra_bytes(vocabulary), 2 * kLogitBlockBytes);  // else it would not be counted
    EXPECT_LT(extra_bytes(vocabulary), 5 * kLogitBlockBytes);
  }
}

// The negative control: each option, changed a little, is seen.
TEST(EdgeDistribution, AWrongResultIsNoticed) {
  const DistributionProblem given(23, {12, 20, 6, 30}, 31);
  const Results exact = given.run(reference::edge_distribution);
  const auto error_with = [&](auto change) {
    DistributionProblem changed = given;
    change(changed);
    return worst_error(changed.run(edge_distribution), exact);
  };
  EXPECT_LE(error_with([](DistributionProblem&) {}), 1e-12);
  EXPECT_GT(error_with([](auto& problem) { problem.transform.temperature = 1; }), 1e-3);
  EXPECT_GT(error_with([](auto& problem) { problem.transform.logit_scale = 1; }), 1e-3);
  EXPECT_GT(error_with([](auto& problem) { problem.transform.softcap = 0; }), 1e-3);
  EXPECT_GT(error_with([](auto& problem) { problem.bias = problem.bias.flip(0); }), 1e-3);
  EXPECT_GT(error_with([](auto& problem) { problem.edge_temperature = problem.edge_temperature.flip(0); }),
            1e-3);
  EXPECT_GT(error_with([](auto& problem) { problem.grad_out = problem.grad_out.flip(0); }), 1e-3);
}

TEST(EdgeDistribution, RefuseWhatDoesNotFit) {
  const at::Tensor hidden = at::randn({3, 4}), weight = at::randn({5, 4});
  const at::Tensor row = at::arange(3, at::kLong);
  const auto call = [&](const LogitTransform& transform) {
    return edge_distribution(hidden, weight, row, row, transform);
  };
  EXPECT_NO_THROW(call({.bias = at::randn({5}), .edge_temperature = at::ones({3}), .softcap = 2}));
  EXPECT_THROW(call({.bias = at::randn({4})}), c10::Error);
  EXPECT_THROW(call({.bias = at::randn({5}, at::kDouble)}), c10::Error);
  EXPECT_THROW(call({.edge_temperature = at::ones({2})}), c10::Error);
  EXPECT_THROW(call({.edge_temperature = at::ones({3}).to(at::kDouble)}), c10::Error);
  EXPECT_THROW(call({.edge_temperature = at::zeros({3})}), c10::Error);
  EXPECT_THROW(call({.edge_temperature = at::ones({3}).requires_grad_()}), c10::Error);
  EXPECT_THROW(call({.temperature = 0}), c10::Error);
  EXPECT_THROW(call({.temperature = -1}), c10::Error);
  EXPECT_THROW(call({.logit_scale = std::numeric_limits<double>::quiet_NaN()}), c10::Error);
  EXPECT_THROW(call({.softcap = -1}), c10::Error);
  EXPECT_THROW(edge_distribution(hidden, weight, row + 1, row, {}), c10::Error);
  EXPECT_THROW(edge_distribution(hidden, weight, row, row + 3, {}), c10::Error);
}

}  // namespace
}  // namespace espalier::testing
