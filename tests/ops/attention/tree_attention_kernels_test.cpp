// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of tree_attention: what their tiles, scratch memory, threads and levels could get wrong.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "espalier/ops/attention/masked.h"
#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/kernels/cpu/attention/tree_attention.h"
#include "tests/ops/attention/attention_problem.h"
#include "tests/ops/attention/reference.h"
#include "tests/ops/gemm/forced_products.h"
#include "tests/ops/kernels/cpu/attention/tile_counts.h"
#include "tests/ops/kernels/cpu/forced_instruction_set.h"
#include "tests/ops/threads.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::cast;
using testing::for_each_product_choice;
using testing::ForcedInstructionSet;
using testing::PooledErrors;
using testing::relative_error;
using testing::Results;
using testing::same_bits;
using testing::test_seed;
using testing::Threads;
using testing::with_gradients;
using testing::worst_error;
using Ends = std::vector<int32_t>;

/// A forest with two context segments, if any.
struct Problem {
  Ends ends;
  std::vector<at::Tensor> inputs;  // q, k, v and the segments' k and v, float64
  std::vector<int64_t> blocks;
  at::Tensor grad_out;
};

struct Shape {
  size_t num_tokens;
  int max_node_tokens;
  int64_t num_heads, num_key_heads, head_dim;
  bool context = true;
};

Problem make_problem(uint64_t seed, const Shape& shape) {
  std::mt19937_64 random(test_seed(seed));
  Problem problem;
  while (problem.ends.size() < shape.num_tokens) {
    const auto offset = static_cast<int32_t>(problem.ends.size());
    const auto kind = static_cast<testing::ForestShape>(seed % testing::kNumForestShapes);
    for (const int32_t end : testing::random_subtree_end(random, kind, 30, shape.max_node_tokens)) {
      problem.ends.push_back(end + offset);
    }
  }
  problem.ends.resize(shape.num_tokens);
  const auto tokens = static_cast<int64_t>(shape.num_tokens);
  for (int32_t& end : problem.ends) end = std::min(end, static_cast<int32_t>(tokens));
  const auto generator = at::detail::createCPUGenerator(test_seed(seed));
  const auto normal = [&](int64_t count, int64_t heads) {
    return at::randn({count, heads, shape.head_dim}, generator, at::TensorOptions(at::kDouble));
  };
  problem.inputs = {normal(tokens, shape.num_heads), normal(tokens, shape.num_key_heads),
                    normal(tokens, shape.num_key_heads)};
  if (shape.context) {
    for (int kind = 0; kind < 2; ++kind) {
      for (const int64_t size : {300, 70}) problem.inputs.push_back(normal(size, shape.num_key_heads));
    }
    problem.blocks = {0, 3,  290, 0,          tokens, 1, 0, 40, 0, std::max<int64_t>(tokens / 2, 1),
                      1, 50, 70,  tokens / 2, tokens};
  }
  problem.grad_out = normal(tokens, shape.num_heads);
  return problem;
}

using Attention = decltype(&tree_attention);

Results run(Attention attention, const Problem& problem, at::ScalarType dtype = at::kDouble) {
  const auto attend = [&](const std::vector<at::Tensor>& in) {
    AttentionContext context;
    if (in.size() > 3) {
      context = {{in[3], in[4]}, {in[5], in[6]}, at::tensor(problem.blocks, at::kLong).view({-1, 5})};
    }
    const double scale = 1 / std::sqrt(static_cast<double>(in[0].size(2)));
    return attention(in[0], in[1], in[2], {at::tensor(problem.ends, at::kInt)}, {scale}, context);
  };
  return with_gradients(attend, cast(problem.inputs, dtype), problem.grad_out.to(dtype));
}

/// The problem with numbers that dtype holds exactly.
Problem rounded(Problem problem, at::ScalarType dtype) {
  problem.inputs = cast(cast(problem.inputs, dtype), at::kDouble);
  problem.grad_out = problem.grad_out.to(dtype).to(at::kDouble);
  return problem;
}

/// Makes at::empty return NaN while it lives: results, sums and scratch.
class PoisonedMemory {
 public:
  PoisonedMemory() {
    at::globalContext().setDeterministicFillUninitializedMemory(true);
    at::globalContext().setDeterministicAlgorithms(true, true);
  }
  ~PoisonedMemory() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST(TreeAttentionKernels, EqualReferenceWhateverMemoryHeldBefore) {
  const PoisonedMemory poisoned;
  ASSERT_TRUE(at::empty({8}, at::kFloat).isnan().all().item<bool>());
  uint64_t seed = 0;
  for (const size_t num_tokens : {1, 63, 65, 500}) {
    for (const int max_node_tokens : {2, 30, 400}) {
      for (const bool context : {false, true}) {
        ++seed;
        SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << num_tokens << " tokens");
        const Problem problem = make_problem(seed, {num_tokens, max_node_tokens, 6, 2, 20, context});
        EXPECT_LE(worst_error(run(tree_attention, problem), run(reference::tree_attention, problem)), 1e-12);
      }
    }
  }
}

// Full or partial is decided by one token: trees that end around the borders of blocks.
TEST(TreeAttentionKernels, EqualReferenceWhereTreesEndAroundBordersOfBlocks) {
  const BlockSizes sizes = attention_blocks({200, 1, 1, 8, 8}, Ends(200, 200));
  ASSERT_EQ(sizes.queries, 64);
  ASSERT_EQ(sizes.keys, 64);
  for (const int32_t end : {1, 2, 63, 64, 65, 66, 126, 127, 128, 129, 130, 191, 192, 193, 198, 199}) {
    SCOPED_TRACE(end);
    Problem problem = make_problem(3, {200, 5, 1, 1, 8});
    for (int32_t i = 0; i < 200; ++i) problem.ends[i] = i < end ? end : 200;
    EXPECT_LE(worst_error(run(tree_attention, problem), run(reference::tree_attention, problem)), 1e-12);
    for (int32_t i = 0; i < 200; ++i) problem.ends[i] = i < 3 || i >= end ? 200 : end;  // below a common root
    EXPECT_LE(worst_error(run(tree_attention, problem), run(reference::tree_attention, problem)), 1e-12);
  }
}

/// subtree_end of a star: nodes of `node_tokens` below a root of as many.
Ends star(int32_t num_nodes, int32_t node_tokens) {
  Ends ends(static_cast<size_t>(node_tokens), num_nodes * node_tokens);
  for (int32_t node = 1; node < num_nodes; ++node) {
    ends.insert(ends.end(), static_cast<size_t>(node_tokens), (node + 1) * node_tokens);
  }
  return ends;
}

TEST(TreeAttentionKernels, BlocksGrowWithTheNodes) {
  const auto queries = [](const AttentionShape& shape, int32_t node_tokens) {
    return attention_blocks(shape, star(static_cast<int32_t>(shape.num_tokens) / node_tokens, node_tokens))
        .queries;
  };
  EXPECT_EQ(queries({4096, 16, 8, 128, 128}, 8), 32);
  EXPECT_EQ(queries({4096, 16, 8, 128, 128}, 128), 64);
  EXPECT_EQ(queries({4096, 16, 8, 128, 128}, 512), 128);
  EXPECT_EQ(queries({4096, 9, 3, 64, 64}, 128), 32);
  EXPECT_EQ(queries({4096, 9, 3, 64, 64}, 512), 64);
  EXPECT_EQ(queries({4096, 8, 8, 64, 64}, 1024), 128);
  EXPECT_EQ(queries({4096, 16, 8, 256, 256}, 512), 64);  // a tile of more would be too large
  EXPECT_EQ(queries({4096, 16, 8, 64, 256}, 512), 64);
  EXPECT_EQ(queries({256, 16, 8, 128, 128}, 256), 64);  // so that there are enough of them
  EXPECT_EQ(queries({4096, 64, 1, 64, 64}, 512), 8);
}

TEST(TreeAttentionKernels, EqualReferenceInBlocksOfAllSizes) {
  for (const int32_t node_tokens : {9, 70, 260}) {
    for (const auto& [heads, key_heads] : {std::pair(8, 8), std::pair(16, 8), std::pair(12, 4)}) {
      SCOPED_TRACE(::testing::Message() << node_tokens << " tokens a node, " << heads << " heads");
      const int32_t num_nodes = 700 / node_tokens;
      const auto tokens = static_cast<size_t>(num_nodes * node_tokens);
      Problem problem = make_problem(60, {tokens, 5, heads, key_heads, 8});
      problem.ends = star(num_nodes, node_tokens);
      EXPECT_LE(worst_error(run(tree_attention, problem), run(reference::tree_attention, problem)), 1e-12);
    }
  }
}

TEST(TreeAttentionKernels, EqualReferenceForHeadDimensionsAndGroups) {
  uint64_t seed = 40;
  for (const int64_t head_dim : {1, 7, 64, 80, 96, 128, 256}) {
    for (const auto& [heads, key_heads] : {std::pair(2, 2), std::pair(9, 3), std::pair(32, 1)}) {
      ++seed;
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << heads << " heads of " << head_dim);
      const Problem problem = make_problem(seed, {150, 12, heads, key_heads, head_dim});
      EXPECT_LE(worst_error(run(tree_attention, problem), run(reference::tree_attention, problem)), 1e-12);
    }
  }
}

TEST(TreeAttentionKernels, ErrorInLowPrecisionIsAtMostTwiceThatOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Shape& shape :
         {Shape{1023, 40, 3, 1, 64}, Shape{700, 200, 4, 2, 128}, Shape{300, 9, 2, 2, 80}}) {
      SCOPED_TRACE(::testing::Message() << dtype << ", " << shape.num_tokens << " tokens");
      const Problem problem = rounded(make_problem(70, shape), dtype);
      const Results exact = run(reference::tree_attention, problem);
      const Results plain = run(reference::tree_attention, problem, dtype);
      for_each_product_choice([&] {
        EXPECT_TRUE(
            PooledErrors(run(tree_attention, problem, dtype), plain, exact).at_most_twice_the_plain());
      });
    }
  }
}

// Products of all sizes that tiles have, groups of rows and words that are not full among them; and whatever
// scratch memory held before.
TEST(TreeAttentionKernels, EqualReferenceInLowPrecisionForEveryChoiceOfProducts) {
  constexpr Shape kTried[] = {{1, 1, 1, 1, 1, false}, {63, 9, 6, 2, 20},    {65, 30, 1, 1, 7},
                              {129, 2, 5, 1, 33},     {500, 400, 4, 4, 80}, {700, 40, 9, 3, 64},
                              {500, 200, 4, 2, 128},  {150, 12, 2, 1, 256}};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<Problem> problems;
    std::vector<Results> exact, plain;
    for (const Shape& shape : kTried) {
      problems.push_back(rounded(make_problem(301 + problems.size(), shape), dtype));
      exact.push_back(run(reference::tree_attention, problems.back()));
      plain.push_back(run(reference::tree_attention, problems.back(), dtype));
    }
    for_each_product_choice([&] {
      PooledErrors errors;
      for (size_t k = 0; k < problems.size(); ++k) {
        SCOPED_TRACE(::testing::Message() << dtype << ", problem " << k);
        const Results ours = run(tree_attention, problems[k], dtype);
        errors.add(ours, plain[k], exact[k]);
        const PoisonedMemory poisoned;
        const Results again = run(tree_attention, problems[k], dtype);
        for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(same_bits(ours[i], again[i])) << i;
      }
      EXPECT_TRUE(errors.at_most_twice_the_plain()) << dtype;
    });
  }
}

TEST(TreeAttentionKernels, AgreeWithChunksOfQueriesAndTheirLse) {
  const Problem problem = make_problem(91, {400, 50, 6, 3, 32});
  const auto& in = problem.inputs;
  const at::Tensor blocks = at::tensor(problem.blocks, at::kLong).view({-1, 5});
  const detail::TreeAttentionArguments arguments{in[0], in[1],
                                                 in[2], {at::tensor(problem.ends, at::kInt)},
                                                 {0.2}, {{in[3], in[4]}, {in[5], in[6]}, blocks}};
  const auto [out, lse] = testing::call_operator(arguments);
  const auto [same_out, same_lse] = masked_chunks::tree_attention(arguments);
  EXPECT_LE(relative_error(out, same_out), 1e-13);
  EXPECT_LE(relative_error(lse, same_lse), 1e-13);
  EXPECT_EQ(lse.sizes(), same_lse.sizes());
}

TEST(TreeAttentionKernels, AllTileClassesAreAmongTheTestedProblems) {
  const Problem problem = make_problem(70, {1023, 40, 3, 1, 64});
  const std::vector<ContextRectangle> context = {{0, 3, 290, 0, 1023}, {1, 0, 40, 0, 512}};
  const Schedule schedule =
      make_schedule(problem.ends, context, attention_blocks({1023, 3, 1, 64, 64}, problem.ends));
  const auto counts = testing::TileCounts::of(schedule);
  EXPECT_GT(counts.empty, 10);
  EXPECT_GT(counts.partial, 10);
  EXPECT_GT(counts.full, 10);
}

TEST(TreeAttentionKernels, GiveTheSameBitsForAnyNumberOfThreads) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Shape& shape :
         {Shape{1500, 100, 1, 1, 64}, Shape{900, 20, 6, 2, 128}, Shape{1200, 3000, 9, 3, 64}}) {
      const Problem problem = make_problem(100, shape);
      for_each_product_choice([&] {
        Results one;
        {
          const Threads threads(1);
          one = run(tree_attention, problem, dtype);
        }
        for (const int count : {2, 5}) {
          const Threads threads(count);
          const Results more = run(tree_attention, problem, dtype);
          for (size_t i = 0; i < one.size(); ++i) {
            EXPECT_TRUE(same_bits(one[i], more[i])) << dtype << ", " << count << " threads, result " << i;
          }
        }
      });
    }
  }
}

TEST(TreeAttentionKernels, WorkAtEveryInstructionSetOfTheMachine) {
  const Problem problem = make_problem(7, {300, 25, 6, 2, 64});
  const Results exact = run(reference::tree_attention, problem);
  for (const char* name : {"default", "avx2", "avx512", "avx512_bf16"}) {
    const ForcedInstructionSet level(name);
    try {
      instruction_set();
    } catch (const std::runtime_error&) {
      continue;  // not on this machine
    }
    EXPECT_LE(worst_error(run(tree_attention, problem), exact), 1e-12) << name;
    for_each_product_choice([&] {
      EXPECT_LE(worst_error(run(tree_attention, problem, at::kFloat), exact), 2e-6) << name;
      EXPECT_LE(worst_error(run(tree_attention, problem, at::kBFloat16), exact), 2e-2) << name;
    });
  }
  const ForcedInstructionSet unknown("fastest");
  EXPECT_THROW(run(tree_attention, problem), std::runtime_error);
}

// Infinities and NaN in v, k and dO must reach who sees them and nobody else, forward and backward.
void expect_non_finite_numbers_among_those_who_see_them(at::ScalarType dtype) {
  const Problem clean = make_problem(200, {150, 8, 4, 2, 16, false});
  constexpr int64_t kToken = 60;
  std::vector<int64_t> unrelated;
  for (int64_t j = 0; j < 150; ++j) {
    if (!testing::visible(clean.ends, j, kToken) && !testing::visible(clean.ends, kToken, j))
      unrelated.push_back(j);
  }
  ASSERT_GT(unrelated.size(), 20u);
  const Results before = run(tree_attention, clean, dtype);
  for (const double value :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    for (size_t place = 0; place < 4; ++place) {  // q, k, v, dO
      Problem poisoned = clean;
      at::Tensor& tensor = place < 3 ? poisoned.inputs[place] : poisoned.grad_out;
      tensor = tensor.clone();
      tensor[kToken].fill_(value);
      const Results after = run(tree_attention, poisoned, dtype);
      // What shares an ancestor with the token is reached in dK and dV of the ancestor alone.
      for (size_t i = 0; i < before.size(); ++i) {
        for (const int64_t j : unrelated) {
          ASSERT_TRUE(same_bits(before[i][j], after[i][j]))
              << "place " << place << ", result " << i << ", token " << j;
        }
      }
      const size_t reached = place == 3 ? 3 : 0;  // dV, or the output
      EXPECT_FALSE(after[reached][kToken].isfinite().all().item<bool>()) << "place " << place;
    }
  }
}

TEST(TreeAttentionKernels, KeepNonFiniteNumbersAmongThoseWhoSeeThem) {
  expect_non_finite_numbers_among_those_who_see_them(at::kDouble);
  for_each_product_choice([] {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(dtype);
      expect_non_finite_numbers_among_those_who_see_them(dtype);
    }
  });
}

}  // namespace
}  // namespace espalier
