// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/edge_logprobs/edge_logprobs.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>

#include "espalier/ops/edge_logprobs/logit_blocks.h"
#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "espalier/runtime/tensor_memory.h"
#include "tests/ops/comparison.h"
#include "tests/ops/edge_logprobs/reference.h"
#include "tests/ops/gemm/forced_products.h"
#include "tests/ops/kernels/cpu/forced_instruction_set.h"
#include "tests/ops/kernels/cpu/instruction_sets.h"
#include "tests/ops/threads.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::cast;
using testing::draws_for;
using testing::for_each_product_choice;
using testing::ForcedInstructionSet;
using testing::instruction_sets_of_this_machine;
using testing::PooledErrors;
using testing::relative_error;
using testing::Results;
using testing::same_bits;
using testing::test_seed;
using testing::Threads;
using testing::with_gradients;
using testing::worst_error;

struct Problem {
  std::vector<at::Tensor> inputs;  // hidden, weight in float64
  at::Tensor edge_row;
  at::Tensor edge_target;
  at::Tensor grad_out;
};

struct Sizes {
  int64_t num_rows;
  int64_t num_edges;
  int64_t hidden_size;
  int64_t vocabulary;
};

// Rows without an edge, rows with several, and edges that repeat are all likely.
Problem make_problem(uint64_t seed, const Sizes& sizes) {
  std::mt19937_64 random(test_seed(seed));
  std::vector<int64_t> rows;
  std::vector<int64_t> targets;
  for (int64_t e = 0; e < sizes.num_edges; ++e) {
    rows.push_back(std::uniform_int_distribution<int64_t>(0, sizes.num_rows - 1)(random));
    targets.push_back(std::uniform_int_distribution<int64_t>(0, sizes.vocabulary - 1)(random));
  }
  std::ranges::sort(rows);
  const auto generator = at::detail::createCPUGenerator(test_seed(seed));
  const auto normal = [&](at::IntArrayRef shape) {
    return at::randn(shape, generator, at::TensorOptions(at::kDouble));
  };
  return {{normal({sizes.num_rows, sizes.hidden_size}), normal({sizes.vocabulary, sizes.hidden_size})},
          at::tensor(rows, at::kLong),
          at::tensor(targets, at::kLong),
          normal({sizes.num_edges})};
}

using LogProbs = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&);

Results run(LogProbs logprobs, const Problem& problem, at::ScalarType dtype = at::kDouble) {
  const auto function = [&](const std::vector<at::Tensor>& inputs) {
    return logprobs(inputs[0], inputs[1], problem.edge_row, problem.edge_target);
  };
  const auto grad_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
  return with_gradients(function, cast(problem.inputs, dtype), problem.grad_out.to(grad_dtype));
}

TEST(EdgeLogprobs, EqualReferenceOnRandomEdges) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(test_seed(seed));
    const auto between = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const Problem problem =
        make_problem(seed, {between(1, 20), between(1, 40), between(1, 16), between(1, 60)});
    ASSERT_LE(worst_error(run(edge_logprobs, problem), run(reference::edge_logprobs, problem)), 1e-12);
  }
}

TEST(EdgeLogprobs, EqualReferenceAcrossBlocks) {
  const Sizes sizes{2051, 3000, 6, 4500};
  const LogitBlock block = logit_block(sizes.num_rows, sizes.vocabulary, 8);
  ASSERT_LT(block.num_rows, sizes.num_rows);
  ASSERT_LT(block.num_columns, sizes.vocabulary);
  const Problem problem = make_problem(5, sizes);
  const Results exact = run(reference::edge_logprobs, problem);
  EXPECT_LE(worst_error(run(edge_logprobs, problem), exact), 1e-12);
  EXPECT_LE(worst_error(run(edge_logprobs, problem, at::kFloat), exact), 1e-5);
}

TEST(EdgeLogprobs, ErrorInLowPrecisionIsAtMostTwiceThatOfPlainLogSoftmax) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      SCOPED_TRACE(::testing::Message() << dtype << ", seed " << seed);
      Problem problem = make_problem(seed, {2060, 3000, 16, 2800});
      for (at::Tensor& input : problem.inputs) input = input.to(dtype).to(at::kDouble);
      problem.grad_out = problem.grad_out.to(at::kFloat).to(at::kDouble);
      const Results exact = run(reference::edge_logprobs, problem);
      const Results plain = run(reference::edge_logprobs, problem, dtype);
      for_each_product_choice([&] {
        const Results ours = run(edge_logprobs, problem, dtype);
        EXPECT_TRUE(PooledErrors(ours, plain, exact).at_most_twice_the_plain());
        for (size_t i = 0; i < ours.size(); ++i) {
          EXPECT_EQ(ours[i].scalar_type(), i == 0 ? at::kFloat : dtype);
        }
      });
    }
  }
}

/// The problem with numbers that dtype holds exactly.
Problem rounded(Problem problem, at::ScalarType dtype) {
  problem.inputs = cast(cast(problem.inputs, dtype), at::kDouble);
  problem.grad_out = problem.grad_out.to(at::kFloat).to(at::kDouble);
  return problem;
}

void add_errors(const Problem& problem, at::ScalarType dtype, PooledErrors& errors) {
  errors.add(run(edge_logprobs, problem, dtype), run(reference::edge_logprobs, problem, dtype),
             run(reference::edge_logprobs, problem));
}

// Around the borders of vectors and tiles; three edges per row on average, so that rows with several are
// many. Few rows have few errors: those of several problems are judged together.
TEST(EdgeLogprobs, EqualReferenceAtAwkwardSizesAndEveryInstructionSet) {
  const auto levels = instruction_sets_of_this_machine();
  uint64_t seed = 200;
  for (const int64_t num_rows : {1, 63, 65, 1023}) {
    for (const int64_t vocabulary : {1, 63, 65, 1023}) {
      SCOPED_TRACE(::testing::Message()
                   << "from seed " << seed + 1 << " on, " << num_rows << " rows of " << vocabulary);
      std::map<std::pair<std::string, at::ScalarType>, PooledErrors> errors;
      for (int64_t draw = 0; draw < draws_for(num_rows); ++draw) {
        const Problem given = make_problem(++seed, {num_rows, 3 * num_rows, 24, vocabulary});
        for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
          const Problem problem = rounded(given, dtype);
          const Results exact = run(reference::edge_logprobs, problem);
          const Results plain = run(reference::edge_logprobs, problem, dtype);
          for (const InstructionSet isa : levels) {
            const std::string level(instruction_set_name(isa));
            const ForcedInstructionSet forced(level.c_str());
            const Results ours = run(edge_logprobs, problem, dtype);
            if (dtype == at::kDouble) {
              EXPECT_LE(worst_error(ours, exact), 1e-12) << level;
              continue;
            }
            errors[{level, dtype}].add(ours, plain, exact);
            const KernelScope panels(with_products({Float32Products::kPanels, Bfloat16Products::kNative}));
            errors[{level + ", panels", dtype}].add(run(edge_logprobs, problem, dtype), plain, exact);
          }
        }
      }
      if (vocabulary == 1) continue;  // the exact results are 0
      for (const auto& [which, pool] : errors) {
        EXPECT_TRUE(pool.at_most_twice_the_plain()) << which.first << ", " << which.second;
      }
    }
  }
}

TEST(EdgeLogprobs, TakeARowWithAllEdges) {
  Problem problem = make_problem(12, {9, 400, 8, 1300});
  problem.edge_row.fill_(4);
  EXPECT_LE(worst_error(run(edge_logprobs, problem), run(reference::edge_logprobs, problem)), 1e-12);
}

// Logits of +-10,000 and a little, all of which float32 holds exactly: what is wrong comes from softmax
// alone.
TEST(EdgeLogprobs, ErrorWithExtremeLogitsIsAtMostTwiceThatOfPlainLogSoftmax) {
  constexpr int64_t kRows = 65;
  for (const int64_t vocabulary : {65, 1023}) {
    SCOPED_TRACE(::testing::Message() << "vocabulary " << vocabulary);
    std::map<at::ScalarType, PooledErrors> errors;
    for (int64_t seed = 1; seed <= draws_for(kRows); ++seed) {
      Problem problem = make_problem(seed, {kRows, 200, 5, vocabulary});
      at::Tensor &hidden = problem.inputs[0], &weight = problem.inputs[1];
      hidden.mul_(8).round_().div_(8);
      weight.mul_(8).round_().div_(8);
      hidden.select(1, 0).sign_().mul_(100);
      weight.select(1, 0).fill_(100);
      const at::Tensor logits = hidden.mm(weight.t());
      ASSERT_GT(logits.max().item<double>(), 1e4);
      ASSERT_LT(logits.min().item<double>(), -1e4);
      ASSERT_TRUE(logits.to(at::kFloat).to(at::kDouble).equal(logits));
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        add_errors(rounded(problem, dtype), dtype, errors[dtype]);
      }
    }
    for (const auto& [dtype, pool] : errors) EXPECT_TRUE(pool.at_most_twice_the_plain()) << dtype;
  }
}

TEST(EdgeLogprobs, GiveTheSameBitsForAnyNumberOfThreads) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const Sizes& sizes : {Sizes{1, 3, 64, 1023}, Sizes{17, 40, 1024, 4500}, Sizes{65, 90, 576, 63},
                               Sizes{1100, 2000, 40, 3000}}) {
      const Problem problem = make_problem(31, sizes);
      for_each_product_choice([&] {
        Results one;
        {
          const Threads threads(1);
          one = run(edge_logprobs, problem, dtype);
        }
        for (const int count : {2, 3}) {
          const Threads threads(count);
          const Results more = run(edge_logprobs, problem, dtype);
          for (size_t i = 0; i < one.size(); ++i) {
            EXPECT_TRUE(same_bits(one[i], more[i]))
                << dtype << ", " << sizes.num_rows << " rows, " << count << " threads, result " << i;
          }
        }
      });
    }
  }
}

/// What forward and backward take beyond their arguments, in bytes: the most at any time.
int64_t extra_bytes(int64_t num_rows, int64_t vocabulary, at::ScalarType dtype) {
  constexpr int64_t kHiddenSize = 8;
  const at::Tensor hidden = at::randn({num_rows, kHiddenSize}).to(dtype);
  const at::Tensor weight = at::randn({vocabulary, kHiddenSize}).to(dtype);
  const at::Tensor sum = at::zeros({vocabulary, kHiddenSize});
  const at::Tensor rows = at::arange(num_rows, at::kLong), targets = rows.remainder(vocabulary);
  const at::Tensor grad = at::ones({num_rows});
  const int64_t before = tensor_memory();
  reset_peak_tensor_memory();
  const auto [logprobs, lse] = edge_logprobs_forward(hidden, weight, rows, targets);
  edge_logprobs_backward(grad, hidden, weight, rows, targets, lse, sum);
  return peak_tensor_memory() - before;
}

TEST(EdgeLogprobs, ExtraMemoryDoesNotGrowWithTheMatrixOfLogits) {
  count_tensor_memory();
  const Threads threads(2);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    SCOPED_TRACE(dtype);
    const int64_t tiles = 2 * kLogitTile.num_rows * kLogitTile.num_columns * 6;  // two threads'
    for (const auto& [num_rows, vocabulary] : {std::pair(2048, 9000), {8192, 9000}, {2048, 36'000}}) {
      SCOPED_TRACE(::testing::Message() << num_rows << " rows, vocabulary " << vocabulary);
      const int64_t bytes = extra_bytes(num_rows, vocabulary, dtype);
      EXPECT_GT(bytes, kLogitBlockBytes / 2);  // else it would not be counted
      // Of a row there are its gradient, twice in bfloat16, and a few numbers.
      EXPECT_LT(bytes, kLogitBlockBytes + tiles + num_rows * 128);
    }
  }
}

TEST(EdgeLogprobs, GradientsAreThoseOfFiniteDifferences) {
  const Problem problem = make_problem(3, {4, 7, 3, 5});
  const Results results = run(edge_logprobs, problem);
  for (size_t input = 0; input < 2; ++input) {
    const at::Tensor numeric = at::zeros_like(problem.inputs[input]);
    for (int64_t i = 0; i < numeric.numel(); ++i) {
      constexpr double step = 1e-5;
      const auto loss = [&](double by) {
        std::vector<at::Tensor> moved = problem.inputs;
        moved[input] = moved[input].clone();
        moved[input].view(-1)[i] += by;
        const at::Tensor out = edge_logprobs(moved[0], moved[1], problem.edge_row, problem.edge_target);
        return (out * problem.grad_out).sum().item<double>();
      };
      numeric.view(-1)[i] = (loss(step) - loss(-step)) / (2 * step);
    }
    EXPECT_LE(relative_error(results[1 + input], numeric), 1e-8) << "input " << input;
  }
}

TEST(EdgeLogprobs, SurviveLargeLogits) {
  Problem problem = make_problem(8, {6, 12, 4, 30});
  problem.inputs[0] *= 1e4;
  const Results ours = run(edge_logprobs, problem);
  EXPECT_LE(worst_error(ours, run(reference::edge_logprobs, problem)), 1e-12);
  EXPECT_LT(ours[0].min().item<double>(), -1e3);
}

TEST(EdgeLogprobs, TakeNoEdgesAndNoRows) {
  for (const int64_t num_rows : {0, 3}) {
    const at::Tensor hidden = at::randn({num_rows, 4}).requires_grad_();
    const at::Tensor weight = at::randn({9, 4}).requires_grad_();
    const at::Tensor none = at::empty({0}, at::kLong);
    const at::Tensor out = edge_logprobs(hidden, weight, none, none);
    EXPECT_EQ(out.sizes(), at::IntArrayRef({0}));
    const auto grads = torch::autograd::grad({out.sum()}, {hidden, weight});
    EXPECT_TRUE(grads[0].equal(at::zeros_like(hidden)));
    EXPECT_TRUE(grads[1].equal(at::zeros_like(weight)));
  }
}

TEST(EdgeLogprobs, GiveOnlyTheGradientsThatAreAskedFor) {
  const Problem problem = make_problem(4, {5, 9, 4, 11});
  const Results both = run(edge_logprobs, problem);
  for (size_t input = 0; input < 2; ++input) {
    std::vector<at::Tensor> inputs = {problem.inputs[0].detach(), problem.inputs[1].detach()};
    inputs[input].requires_grad_();
    const at::Tensor out = edge_logprobs(inputs[0], inputs[1], problem.edge_row, problem.edge_target);
    EXPECT_TRUE(torch::autograd::grad({out}, {inputs[input]}, {problem.grad_out})[0].equal(both[1 + input]));
    inputs[input].requires_grad_(false);
  }
}

TEST(EdgeLogprobs, BlocksKeepTheMemoryLimit) {
  for (const int64_t bytes : {4, 6, 8}) {
    for (const int64_t num_rows : {0, 1, 17, 2048, 100'000}) {
      for (const int64_t vocabulary : {1, 50, 49'152, 151'936, 10'000'000}) {
        const LogitBlock block = logit_block(num_rows, vocabulary, bytes);
        EXPECT_LE(block.num_rows * block.num_columns * bytes, kLogitBlockBytes);
        EXPECT_GE(block.num_rows, 1);
        EXPECT_GE(block.num_columns, 1);
        EXPECT_LE(block.num_columns, vocabulary);
        // Neither side is so thin that the product would wait for memory.
        EXPECT_GE(block.num_rows, std::min<int64_t>(std::max<int64_t>(num_rows, 1), 1024));
        EXPECT_GE(block.num_columns, std::min<int64_t>(vocabulary, 1024));
      }
    }
  }
}

TEST(EdgeLogprobs, NegativeControlsAreNoticed) {
  const Problem problem = make_problem(6, {5, 12, 4, 11});
  const Results exact = run(reference::edge_logprobs, problem);
  EXPECT_LE(worst_error(run(edge_logprobs, problem), exact), 1e-12);
  Problem dropped = problem;  // an edge carries no gradient
  dropped.grad_out = problem.grad_out.clone();
  dropped.grad_out[3] = 0;
  EXPECT_GT(worst_error(run(edge_logprobs, dropped), exact), 1e-3);
  Problem shifted = problem;
  shifted.edge_target = (problem.edge_target + 1).remainder(11);
  EXPECT_GT(worst_error(run(edge_logprobs, shifted), exact), 1e-3);
  Problem wrong_row = problem;
  wrong_row.edge_row = (problem.edge_row - 1).clamp_min(0);
  EXPECT_GT(worst_error(run(edge_logprobs, wrong_row), exact), 1e-3);
  Problem shorter = problem;
  for (at::Tensor* edges : {&shorter.edge_row, &shorter.edge_target, &shorter.grad_out})
    *edges = edges->slice(0, 1);
  EXPECT_GT(worst_error(run(edge_logprobs, shorter), exact), 1e-3);
}

TEST(EdgeLogprobs, KnowTheirShapesWithoutData) {
  const auto meta = at::TensorOptions(at::kMeta);
  const at::Tensor hidden = at::empty({6, 8}, meta.dtype(at::kBFloat16)).requires_grad_();
  const at::Tensor weight = at::empty({20, 8}, meta.dtype(at::kBFloat16)).requires_grad_();
  const at::Tensor edges = at::empty({7}, meta.dtype(at::kLong));
  const at::Tensor out = edge_logprobs(hidden, weight, edges, edges);
  EXPECT_EQ(out.sizes(), at::IntArrayRef({7}));
  EXPECT_EQ(out.scalar_type(), at::kFloat);
  const auto grads = torch::autograd::grad({out}, {hidden, weight}, {at::empty_like(out)});
  EXPECT_EQ(grads[0].sizes(), hidden.sizes());
  EXPECT_EQ(grads[1].sizes(), weight.sizes());
}

TEST(EdgeLogprobs, RefuseWhatDoesNotFit) {
  const at::Tensor hidden = at::randn({3, 4});
  const at::Tensor weight = at::randn({5, 4});
  const auto edges = [](std::vector<int64_t> values) { return at::tensor(values, at::kLong); };
  EXPECT_NO_THROW(edge_logprobs(hidden, weight, edges({0, 2, 2}), edges({4, 0, 1})));
  EXPECT_THROW(edge_logprobs(hidden, weight, edges({0, 3}), edges({1, 1})), c10::Error);
  EXPECT_THROW(edge_logprobs(hidden, weight, edges({-1, 0}), edges({1, 1})), c10::Error);
  EXPECT_THROW(edge_logprobs(hidden, weight, edges({1, 0}), edges({1, 1})), c10::Error);
  EXPECT_THROW(edge_logprobs(hidden, weight, edges({0, 1}), edges({1, 5})), c10::Error);
  EXPECT_THROW(edge_logprobs(hidden, weight, edges({0, 1}), edges({1, -1})), c10::Error);
  EXPECT_THROW(edge_logprobs(hidden, weight, edges({0, 1}), edges({1})), c10::Error);
  EXPECT_THROW(edge_logprobs(hidden, weight.slice(1, 1), edges({0}), edges({1})), c10::Error);
  EXPECT_THROW(edge_logprobs(hidden, weight.to(at::kDouble), edges({0}), edges({1})), c10::Error);
  EXPECT_THROW(edge_logprobs(hidden, weight, edges({0}).to(at::kInt), edges({1})), c10::Error);
}

}  // namespace
}  // namespace espalier
