// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/elementwise/elementwise.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <limits>
#include <map>

#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "tests/ops/comparison.h"
#include "tests/ops/elementwise/elementwise_problems.h"
#include "tests/ops/elementwise/reference.h"
#include "tests/ops/kernels/cpu/instruction_sets.h"
#include "tests/ops/threads.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::draws_for;
using testing::ElementwiseProblem;
using testing::ElementwiseProblems;
using testing::ForcedInstructionSet;
using testing::instruction_sets_of_this_machine;
using testing::PooledErrors;
using testing::relative_error;
using testing::Results;
using testing::same_bits;
using testing::test_seed;
using testing::Threads;
using testing::worst_error;
using Tensors = std::vector<at::Tensor>;

constexpr double kEps = ElementwiseProblems::kEps;

/// Problems in float64.
ElementwiseProblems problems(uint64_t seed) {
  return {seed, at::kDouble};
}

/// Calls visit with every instruction set of the machine forced.
void at_every_instruction_set(const std::function<void(const std::string& name)>& visit) {
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    const std::string name(instruction_set_name(isa));
    const ForcedInstructionSet forced(name.c_str());
    SCOPED_TRACE(name);
    visit(name);
  }
}

/// Appends each result to the same result of other problems.
void append(Results& all, const Results& more) {
  all.resize(more.size());
  for (size_t i = 0; i < more.size(); ++i) {
    const at::Tensor flat = more[i].flatten();
    all[i] = all[i].defined() ? at::cat({all[i], flat}) : flat;
  }
}

TEST(Elementwise, EqualReferenceAtEveryInstructionSet) {
  uint64_t seed = 0;
  for (const int64_t rows : {1, 63, 65, 1023}) {
    for (const int64_t width : {1, 63, 65, 576, 1023}) {
      SCOPED_TRACE(::testing::Message()
                   << "from seed " << seed + 1 << " on, " << rows << " rows of " << width);
      std::map<std::string, std::pair<Results, Results>> all;  // ours and plain, by case and instruction set
      // In rows of one the gradient of a norm's weights is a single sum, which may cancel: several together
      // do not.
      for (int draw = 0; draw < (width == 1 ? 16 : 1); ++draw) {
        for (const ElementwiseProblem& given : problems(++seed).all(rows, width)) {
          const Results plain = given.run_plain();
          at_every_instruction_set([&](const std::string& isa) {
            auto& [ours, plains] = all[given.name + ", " + isa];
            const Results results = given.run();
            for (size_t i = 0; i < plain.size(); ++i) ASSERT_EQ(results[i].sizes(), plain[i].sizes());
            append(ours, results);
            append(plains, plain);
          });
        }
      }
      for (const auto& [which, results] : all) {
        EXPECT_LE(worst_error(results.first, results.second), 1e-14) << which;
      }
    }
  }
}

TEST(Elementwise, EqualReferenceForHeads) {
  for (const int64_t dim : {2, 16, 64, 80, 128}) {
    ElementwiseProblems cases = problems(dim);
    for (const int64_t heads : {1, 9}) {
      const ElementwiseProblem rotation = cases.rotation(67, heads, dim), norm = cases.norm({67, heads, dim});
      EXPECT_LE(worst_error(rotation.run(), rotation.run_plain()), 1e-14) << heads << " heads of " << dim;
      EXPECT_LE(worst_error(norm.run(), norm.run_plain()), 1e-14) << heads << " heads of " << dim;
    }
  }
}

TEST(Elementwise, ErrorInLowPrecisionIsAtMostTwiceThatOfTheReference) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    uint64_t seed = 100;
    for (const auto& [rows, width] : {std::pair(1023, 576), std::pair(65, 1023), std::pair(6000, 64)}) {
      SCOPED_TRACE(::testing::Message() << dtype << ", from seed " << seed + 1 << " on, rows of " << width);
      std::map<std::string, PooledErrors> errors;  // by case and instruction set
      // The gradient of a norm's weights has one value for each column.
      for (int64_t draw = 0; draw < draws_for(width); ++draw) {
        for (const ElementwiseProblem& given : ElementwiseProblems(++seed, dtype).all(rows, width)) {
          const Results best = given.run_plain(), plain = given.run_plain(dtype);
          at_every_instruction_set([&](const std::string& isa) {
            const Results ours = given.run(dtype);
            for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype);
            errors[given.name + ", " + isa].add(ours, plain, best);
          });
        }
      }
      for (const auto& [which, pool] : errors) EXPECT_TRUE(pool.at_most_twice_the_plain()) << which;
    }
  }
}

// Every number by itself: an error of one range would drown in a norm over all.
TEST(Elementwise, SwigluInFloat32IsAccurateForGatesOfAllSizes) {
  const at::Tensor gate = at::linspace(-86, 100, 200'001, at::kFloat), up = at::ones_like(gate);
  const at::Tensor exact = gate.to(at::kDouble) / (1 + (-gate.to(at::kDouble)).exp());
  at_every_instruction_set([&](const std::string&) {
    const at::Tensor error = ((swiglu(gate, up) - exact) / exact).abs();
    EXPECT_LE(error.masked_select(gate != 0).max().item<double>(), 4 * 0x1p-24);
  });
}

TEST(Elementwise, SwigluOfExtremesIsThatOfTheReference) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor gate =
        at::tensor({-kInfinity, -1000.f, -90.f, 0.f, 1000.f, kInfinity, std::nanf("")}).to(dtype);
    const at::Tensor up = at::ones_like(gate), plain = reference::swiglu(gate, up);
    // What is below the normal numbers may be 0.
    EXPECT_TRUE(swiglu(gate, up).allclose(plain, 0, 0x1p-120, /*equal_nan=*/true)) << dtype;
  }
}

TEST(Elementwise, GiveTheSameBitsForAnyNumberOfThreadsAndRows) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const ElementwiseProblem& given : problems(7).all(1023, 576)) {
      Results one;
      {
        const Threads threads(1);
        one = given.run(dtype);
      }
      for (const int count : {2, 3, 3}) {
        const Threads threads(count);
        const Results more = given.run(dtype);
        for (size_t i = 0; i < one.size(); ++i) {
          EXPECT_TRUE(same_bits(one[i], more[i]))
              << given.name << ", " << dtype << ", " << count << " threads, result " << i;
        }
      }
    }
  }
}

TEST(Elementwise, TakeTensorsThatAreNotContiguous) {
  const auto apart = [](const at::Tensor& tensor) {  // the same numbers, elements and rows apart
    const at::Tensor wide = at::stack({tensor, tensor}, -1).select(-1, 0);
    return tensor.dim() != 2 ? wide : wide.transpose(0, 1).contiguous().transpose(0, 1);
  };
  for (const ElementwiseProblem& given : problems(11).all(65, 80)) {
    ElementwiseProblem strided = given;
    for (at::Tensor& input : strided.inputs) input = apart(input);
    strided.grad_out = apart(given.grad_out);
    ASSERT_FALSE(strided.grad_out.is_contiguous());
    const Results expected = given.run(), actual = strided.run();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(expected[i].equal(actual[i])) << given.name;
  }
}

TEST(Elementwise, GradientsAreThoseOfFiniteDifferences) {
  for (const ElementwiseProblem& given : problems(13).all(3, 6)) {
    const Results results = given.run();
    for (size_t input = 0; input < given.inputs.size(); ++input) {
      const at::Tensor numeric = at::zeros_like(given.inputs[input]);
      for (int64_t i = 0; i < numeric.numel(); ++i) {
        constexpr double kStep = 1e-5;
        const auto loss = [&](double by) {
          Tensors moved = given.inputs;
          moved[input] = moved[input].clone();
          moved[input].view(-1)[i] += by;
          return (given.ours(moved) * given.grad_out).sum().item<double>();
        };
        numeric.view(-1)[i] = (loss(kStep) - loss(-kStep)) / (2 * kStep);
      }
      EXPECT_LE(relative_error(results[input + 1], numeric), 1e-8) << given.name << ", input " << input;
    }
  }
}

TEST(Elementwise, EmptyTensorsGiveEmptyOnesAndNoGradient) {
  for (const ElementwiseProblem& given : problems(17).all(0, 8)) {
    const Results results = given.run();
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].sizes(), i == 0 ? given.grad_out.sizes() : given.inputs[i - 1].sizes());
      EXPECT_EQ(results[i].abs().sum().item<double>(), 0) << given.name;
    }
  }
}

TEST(Elementwise, GradientsThatNobodyWantsAreLeftOut) {
  const at::Tensor x = problems(19).normal({5, 8}), weight = at::ones({8}, at::kDouble);
  const RmsNormOutput output = rms_norm_forward(x, {}, weight, kEps);
  EXPECT_FALSE(output.sum.defined());
  const RmsNormGradient given{x, {}, x, weight, output.inverse_rms};
  const RmsNormGradients both = rms_norm_backward(given, {true, true});
  EXPECT_TRUE(rms_norm_backward(given, {true, false}).x.equal(both.x));
  EXPECT_TRUE(rms_norm_backward(given, {false, true}).weight.equal(both.weight));
  EXPECT_FALSE(rms_norm_backward(given, {true, false}).weight.defined());
  EXPECT_FALSE(rms_norm_backward(given, {false, true}).x.defined());
}

TEST(Elementwise, RefuseWhatDoesNotFit) {
  const auto options = at::TensorOptions(at::kFloat);
  const at::Tensor x = at::ones({4, 2, 6}, options), table = at::ones({4, 3}, options);
  EXPECT_THROW(rms_norm_forward(x, {}, at::ones({5}, options), kEps), c10::Error);
  EXPECT_THROW(rms_norm_forward(x, x.slice(0, 0, 3), at::ones({6}, options), kEps), c10::Error);
  EXPECT_THROW(rms_norm_forward(x, {}, at::ones({6}, at::kDouble), kEps), c10::Error);
  EXPECT_THROW(rms_norm_forward(x.to(at::kHalf), {}, at::ones({6}, at::kHalf), kEps), c10::Error);
  EXPECT_THROW(rotary(x, table.slice(0, 1), table), c10::Error);
  EXPECT_THROW(rotary(x, table, table.to(at::kDouble)), c10::Error);
  EXPECT_THROW(rotary(x.slice(2, 1), table, table), c10::Error);
  EXPECT_THROW(swiglu(x, x.slice(1, 1)), c10::Error);
  EXPECT_THROW(swiglu(x, x.to(at::kBFloat16)), c10::Error);
}

}  // namespace
}  // namespace espalier
