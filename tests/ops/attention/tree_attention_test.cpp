// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/tree_attention.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/ops/attention/random_subtrees.h"
#include "tests/ops/attention/reference.h"
#include "tests/ops/comparison.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::cast;
using testing::ForestShape;
using testing::PooledErrors;
using testing::random_subtree_end;
using testing::relative_error;
using testing::Results;
using testing::same_bits;
using testing::test_seed;
using testing::with_gradients;
using testing::worst_error;
using Ends = std::vector<int32_t>;

struct Shape {
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t head_dim;
};

struct Problem {
  Ends ends;
  at::Tensor subtree_end;
  std::vector<at::Tensor> inputs;  // q, k, v in float64
  at::Tensor grad_out;
  double scale;
};

Problem make_problem(uint64_t seed, const Ends& ends, const Shape& shape) {
  const auto generator = at::detail::createCPUGenerator(test_seed(seed));
  const auto num_tokens = static_cast<int64_t>(ends.size());
  const auto normal = [&](int64_t heads) {
    return at::randn({num_tokens, heads, shape.head_dim}, generator, at::TensorOptions(at::kDouble));
  };
  return {ends,
          at::tensor(ends, at::kInt),
          {normal(shape.num_heads), normal(shape.num_key_heads), normal(shape.num_key_heads)},
          normal(shape.num_heads),
          1 / std::sqrt(static_cast<double>(shape.head_dim))};
}

using Attention = decltype(&tree_attention);

Results run(Attention attention, const Problem& problem, at::ScalarType dtype,
            const at::Tensor& subtree_end) {
  const auto attend = [&](const std::vector<at::Tensor>& qkv) {
    return attention(qkv[0], qkv[1], qkv[2], {subtree_end}, {problem.scale}, {});
  };
  return with_gradients(attend, cast(problem.inputs, dtype), problem.grad_out.to(dtype));
}

Results run(Attention attention, const Problem& problem, at::ScalarType dtype = at::kDouble) {
  return run(attention, problem, dtype, problem.subtree_end);
}

double error_in_float64(const Problem& problem) {
  return worst_error(run(tree_attention, problem), run(reference::tree_attention, problem));
}

Ends forest_of_about(uint64_t seed, size_t num_tokens, int max_node_tokens) {
  std::mt19937_64 random(test_seed(seed));
  Ends ends;
  while (ends.size() < num_tokens) {
    const Ends tree = random_subtree_end(random, ForestShape::kMixed, 20, max_node_tokens);
    const auto offset = static_cast<int32_t>(ends.size());
    for (int32_t end : tree) ends.push_back(end + offset);
  }
  ends.resize(num_tokens);
  for (int32_t& end : ends) end = std::min(end, static_cast<int32_t>(num_tokens));
  return ends;
}

TEST(TreeAttention, EqualsReferenceInRandomForests) {
  const Shape shapes[] = {{1, 1, 8}, {2, 1, 5}, {4, 4, 3}, {4, 2, 8}, {9, 3, 4}};
  for (uint64_t seed = 0; seed < 1400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(test_seed(seed));
    const Ends ends =
        random_subtree_end(random, static_cast<ForestShape>(seed % testing::kNumForestShapes), 12, 6);
    ASSERT_LE(error_in_float64(make_problem(seed, ends, shapes[seed % std::size(shapes)])), 1e-12);
  }
}

TEST(TreeAttention, EqualsReferenceForEveryHeadCountAndDimension) {
  for (const int64_t num_key_heads : {1, 2, 3}) {
    for (const int64_t group : {1, 2, 3, 4}) {
      for (const int64_t head_dim : {1, 8, 33, 64, 128}) {
        SCOPED_TRACE(::testing::Message() << num_key_heads << " x " << group << " heads of " << head_dim);
        const Shape shape{num_key_heads * group, num_key_heads, head_dim};
        EXPECT_LE(error_in_float64(make_problem(7, forest_of_about(3, 70, 12), shape)), 1e-12);
      }
    }
  }
}

TEST(TreeAttention, EqualsReferenceForAwkwardLengths) {
  for (const size_t num_tokens : {1, 63, 65, 1023}) {
    for (const int max_node_tokens : {3, 300}) {
      SCOPED_TRACE(::testing::Message() << num_tokens << " tokens, nodes up to " << max_node_tokens);
      const Ends ends = forest_of_about(5, num_tokens, max_node_tokens);
      EXPECT_LE(error_in_float64(make_problem(11, ends, {3, 1, 16})), 1e-12);
    }
  }
}

TEST(TreeAttention, TakesStridedInputsAndNoTokens) {
  const Problem problem = make_problem(1, forest_of_about(2, 40, 6), {4, 2, 8});
  std::vector<at::Tensor> strided;
  for (const at::Tensor& input : problem.inputs)
    strided.push_back(input.permute({2, 1, 0}).contiguous().permute({2, 1, 0}));
  EXPECT_LE(relative_error(
                tree_attention(strided[0], strided[1], strided[2], {problem.subtree_end}, {problem.scale}),
                run(reference::tree_attention, problem)[0]),
            1e-12);
  const at::Tensor none = at::empty({0, 2, 4}).requires_grad_();
  const at::Tensor out = tree_attention(none, none, none, {at::empty({0}, at::kInt)}, {1.0});
  EXPECT_EQ(out.sizes(), none.sizes());
  EXPECT_EQ(torch::autograd::grad({out.sum()}, {none})[0].sizes(), none.sizes());
}

TEST(TreeAttention, GradientsAreThoseOfFiniteDifferences) {
  const Problem problem = make_problem(21, Ends{9, 9, 5, 5, 5, 9, 7, 9, 9, 10}, {2, 1, 4});
  const Results results = run(tree_attention, problem);
  const auto loss = [&](const std::vector<at::Tensor>& qkv) {
    const at::Tensor out = tree_attention(qkv[0], qkv[1], qkv[2], {problem.subtree_end}, {problem.scale});
    return (out * problem.grad_out).sum().item<double>();
  };
  for (size_t input = 0; input < 3; ++input) {
    const at::Tensor numeric = at::zeros_like(problem.inputs[input]);
    for (int64_t i = 0; i < numeric.numel(); ++i) {
      constexpr double step = 1e-5;
      std::vector<at::Tensor> moved = problem.inputs;
      moved[input] = problem.inputs[input].clone();
      moved[input].view(-1)[i] += step;
      const double above = loss(moved);
      moved[input].view(-1)[i] -= 2 * step;
      numeric.view(-1)[i] = (above - loss(moved)) / (2 * step);
    }
    EXPECT_LE(relative_error(results[1 + input], numeric), 1e-8) << "input " << input;
  }
}

TEST(TreeAttention, ErrorInLowPrecisionIsAtMostTwiceThatOfPlainAttention) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      SCOPED_TRACE(::testing::Message() << dtype << ", seed " << seed);
      Problem problem = make_problem(seed, forest_of_about(seed, 100, 8), {4, 2, 32});
      for (at::Tensor& input : problem.inputs) input = input.to(dtype).to(at::kDouble);
      problem.grad_out = problem.grad_out.to(dtype).to(at::kDouble);
      const Results exact = run(reference::tree_attention, problem);
      const Results ours = run(tree_attention, problem, dtype);
      const Results plain = run(reference::tree_attention, problem, dtype);
      for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype);
      EXPECT_TRUE(PooledErrors(ours, plain, exact).at_most_twice_the_plain());
    }
  }
}

// The plain side here is what a trainer without trees runs: causal flash attention along the root path.
TEST(TreeAttention, ErrorInLowPrecisionIsAtMostTwiceThatOfCausalAttentionPerPath) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Problem problem = make_problem(3, forest_of_about(8, 150, 8), {4, 2, 32});
    for (at::Tensor& input : problem.inputs) input = input.to(dtype).to(at::kDouble);
    const at::Tensor exact = run(reference::tree_attention, problem)[0];
    const at::Tensor plain = at::empty_like(exact);
    for (int64_t j = 0; j < exact.size(0); ++j) {
      std::vector<int64_t> path;
      for (int64_t i = 0; i <= j; ++i) {
        if (testing::visible(problem.ends, j, i)) path.push_back(i);
      }
      const auto along = [&](size_t input) {
        return problem.inputs[input].to(dtype).index_select(0, at::tensor(path)).transpose(0, 1).unsqueeze(0);
      };
      const at::Tensor out = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
          along(0), along(1), along(2), 0.0, true, {}, problem.scale));
      plain[j] = out[0].select(1, -1).to(at::kDouble);
    }
    const at::Tensor ours = run(tree_attention, problem, dtype)[0];
    EXPECT_TRUE(PooledErrors({ours}, {plain}, {exact}).at_most_twice_the_plain()) << dtype;
  }
}

// 0..4 root, 5..8 branch A, 9..10 its first child, 11..13 its second, 14..17 branch B, 18..20 another tree.
const Ends kBranches{18, 18, 18, 18, 18, 14, 14, 14, 14, 11, 11, 14, 14, 14, 18, 18, 18, 18, 21, 21, 21};

// The tokens that branch A's second child (11..13) can neither see nor be seen by.
std::vector<int64_t> neighbours_of_branch() {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 21; ++i) {
    bool related = false;
    for (int64_t j = 11; j < 14; ++j)
      related |= testing::visible(kBranches, j, i) || testing::visible(kBranches, i, j);
    if (!related) tokens.push_back(i);
  }
  return tokens;
}

Problem with_neighbours(const Problem& problem, double value) {
  Problem changed = problem;
  for (at::Tensor& input : changed.inputs) {
    input = input.clone().index_fill_(0, at::tensor(neighbours_of_branch()), value);
  }
  return changed;
}

TEST(TreeAttention, NeighboursLeaveABranchBitwiseAsItWas) {
  ASSERT_EQ(neighbours_of_branch(), (std::vector<int64_t>{9, 10, 14, 15, 16, 17, 18, 19, 20}));
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Problem problem = make_problem(2, kBranches, {4, 2, 16});
    const Results before = run(tree_attention, problem, dtype);
    const Results after = run(tree_attention, with_neighbours(problem, 3.25), dtype);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same_bits(before[i].slice(0, 11, 14), after[i].slice(0, 11, 14)))
          << dtype << ", result " << i;
    }
    EXPECT_FALSE(same_bits(before[0], after[0]));
    // Negative control: an ancestor is seen.
    Problem ancestor = problem;
    ancestor.inputs[2] = ancestor.inputs[2].clone();
    ancestor.inputs[2][3] += 1;
    EXPECT_FALSE(
        same_bits(before[0].slice(0, 11, 14), run(tree_attention, ancestor, dtype)[0].slice(0, 11, 14)));
  }
}

TEST(TreeAttention, NanInNeighboursDoesNotReachABranch) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Problem problem = make_problem(2, kBranches, {4, 2, 16});
    const Problem poisoned = with_neighbours(problem, std::numeric_limits<double>::quiet_NaN());
    const at::Tensor before = run(tree_attention, problem, dtype)[0].slice(0, 11, 14);
    const Results after = run(tree_attention, poisoned, dtype);
    EXPECT_TRUE(after[0].slice(0, 11, 14).isfinite().all().item<bool>()) << dtype;
    EXPECT_TRUE(same_bits(before, after[0].slice(0, 11, 14))) << dtype;
    EXPECT_TRUE(after[0].slice(0, 9, 11).isnan().all().item<bool>()) << dtype;
    EXPECT_TRUE(after[1].slice(0, 11, 14).isfinite().all().item<bool>()) << dtype;
  }
}

TEST(TreeAttention, IsDeterministicForAnyNumberOfThreads) {
  const Problem problem = make_problem(9, forest_of_about(4, 600, 200), {4, 2, 32});
  const int num_threads = at::get_num_threads();
  at::set_num_threads(1);
  const Results one = run(tree_attention, problem, at::kFloat);
  at::set_num_threads(2);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Results two = run(tree_attention, problem, at::kFloat);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i], two[i])) << "result " << i;
  }
  at::set_num_threads(num_threads);
}

// A wrong mask must exceed the bound by which all tests above judge. The wrong masks go to the reference,
// which does not mind what is no forest.
TEST(TreeAttention, NegativeControlsAreNoticed) {
  const Problem problem = make_problem(13, kBranches, {4, 2, 8});
  const auto error_of = [&](const at::Tensor& wrong_end) {
    return worst_error(run(reference::tree_attention, problem, at::kDouble, wrong_end),
                       run(tree_attention, problem));
  };
  EXPECT_LE(error_of(problem.subtree_end), 1e-12);
  EXPECT_GT(error_of(problem.subtree_end + 1), 1e-3);  // the mask is one off
  EXPECT_GT(error_of(problem.subtree_end - 1), 1e-3);
  const auto with = [&](int64_t token, int32_t end) {
    at::Tensor wrong = problem.subtree_end.clone();
    wrong[token] = end;
    return wrong;
  };
  EXPECT_GT(error_of(with(10, 12)), 1e-3);  // one token leaks to a sibling
  EXPECT_GT(error_of(with(9, 14)), 1e-3);
  EXPECT_GT(error_of(with(17, 19)), 1e-3);                            // to another tree
  EXPECT_GT(error_of(with(0, 17)), 1e-3);                             // one (query, key) pair is missing
  EXPECT_GT(error_of(at::full_like(problem.subtree_end, 21)), 1e-3);  // a plain causal mask
  EXPECT_GT(testing::relative_error(problem.grad_out * (1 + 1e-11), problem.grad_out), 1e-12);
}

TEST(TreeAttention, KnowsItsShapesWithoutData) {
  const auto meta = at::TensorOptions(at::kMeta).dtype(at::kBFloat16);
  const at::Tensor q = at::empty({6, 4, 8}, meta).requires_grad_();
  const at::Tensor k = at::empty({6, 2, 8}, meta).requires_grad_();
  const at::Tensor v = at::empty({6, 2, 5}, meta).requires_grad_();
  const at::Tensor out = tree_attention(q, k, v, {at::empty({6}, meta.dtype(at::kInt))}, {1.0});
  EXPECT_EQ(out.sizes(), (std::vector<int64_t>{6, 4, 5}));
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  const auto grads = torch::autograd::grad({out}, {q, k, v}, {at::empty_like(out)});
  EXPECT_EQ(grads[0].sizes(), q.sizes());
  EXPECT_EQ(grads[1].sizes(), k.sizes());
  EXPECT_EQ(grads[2].sizes(), v.sizes());
}

TEST(TreeAttention, RefusesWhatDoesNotFit) {
  const at::Tensor q = at::randn({4, 4, 8});
  const at::Tensor k = at::randn({4, 2, 8});
  const at::Tensor ends = at::full({4}, 4, at::kInt);
  EXPECT_NO_THROW(tree_attention(q, k, k, {ends}, {1.0}));
  EXPECT_THROW(tree_attention(q, at::randn({4, 3, 8}), at::randn({4, 3, 8}), {ends}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q, at::randn({3, 2, 8}), k, {ends}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q, k, at::randn({4, 1, 8}), {ends}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q, k, at::randn({4, 2, 0}), {ends}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q, k.to(at::kDouble), k, {ends}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q.to(at::kHalf), k.to(at::kHalf), k.to(at::kHalf), {ends}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q, k, k, {ends.to(at::kLong)}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q, k, k, {ends.slice(0, 1)}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q[0], k[0], k[0], {ends}, {1.0}), c10::Error);
  EXPECT_THROW(tree_attention(q, k, k, {ends + 1}, {1.0}), std::runtime_error);
  EXPECT_THROW(tree_attention(q, k, k, {at::tensor(Ends{2, 3, 4, 4}, at::kInt)}, {1.0}), std::runtime_error);
}

TEST(TreeAttention, RefusesToBeDifferentiatedTwice) {
  const at::Tensor q = at::randn({4, 2, 8}).requires_grad_();
  const at::Tensor out = tree_attention(q, q, q, {at::full({4}, 4, at::kInt)}, {1.0});
  const at::Tensor grad =
      torch::autograd::grad({out.sum()}, {q}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  EXPECT_THROW(torch::autograd::grad({grad.sum()}, {q}), std::exception);
}

}  // namespace
}  // namespace espalier
