// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/elementwise/elementwise.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <limits>
#include <map>

#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "espalier/ops/reference.h"
#include "tests/ops/comparison.h"
#include "tests/ops/kernels/cpu/forced_instruction_set.h"
#include "tests/ops/threads.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::cast;
using testing::draws_for;
using testing::PooledErrors;
using testing::relative_error;
using testing::Results;
using testing::same_bits;
using testing::test_seed;
using testing::Threads;
using testing::with_gradients;
using testing::worst_error;
using Tensors = std::vector<at::Tensor>;

constexpr double kEps = 0.25;  // beside mean squares of 1: what does without it is found out

/// An operator as a function of its differentiable inputs, and its plain form. Results of several tensors are
/// joined, so that one gradient reaches all of them.
struct Case {
  std::string name;
  Tensors inputs;  // float64
  std::function<at::Tensor(const Tensors&)> ours, plain;
  at::Tensor grad_out;

  Results run(at::ScalarType dtype = at::kDouble) const { return run(ours, dtype); }
  Results run_plain(at::ScalarType dtype = at::kDouble) const { return run(plain, dtype); }

 private:
  Results run(const std::function<at::Tensor(const Tensors&)>& function, at::ScalarType dtype) const {
    return with_gradients(function, cast(inputs, dtype), grad_out.to(dtype));
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_rms_norm(const at::Tensor& x,
                                                             const std::optional<at::Tensor>& addend,
                                                             const at::Tensor& weight, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::rms_norm", "")
                             .typed<decltype(call_rms_norm)>();
  return op.call(x, addend, weight, eps);
}

class Cases {
 public:
  explicit Cases(uint64_t seed) : generator_(at::detail::createCPUGenerator(test_seed(seed))) {}

  at::Tensor normal(at::IntArrayRef shape) {
    return at::randn(shape, generator_, at::TensorOptions(at::kDouble));
  }

  Case norm(at::IntArrayRef shape) {
    return {"norm",
            {normal(shape), normal({shape.back()})},
            [](const Tensors& in) { return std::get<0>(call_rms_norm(in[0], {}, in[1], kEps)); },
            [](const Tensors& in) { return reference::rms_norm(in[0], in[1], kEps); },
            normal(shape)};
  }

  Case norm_of_sum(at::IntArrayRef shape) {
    const std::vector<int64_t> both{2 * shape[0], shape[1]};
    return {"norm of sum",
            {normal(shape), normal(shape), normal({shape.back()})},
            [](const Tensors& in) {
              const auto [y, sum, inverse_rms] = call_rms_norm(in[0], in[1], in[2], kEps);
              return at::cat({y, sum});
            },
            [](const Tensors& in) {
              const at::Tensor sum = in[0] + in[1];
              return at::cat({reference::rms_norm(sum, in[2], kEps), sum});
            },
            normal(both)};
  }

  /// Rows [T, H, D] as they come from a projection of q, k and v at once: heads of more that are left out.
  Case rotation(int64_t tokens, int64_t heads, int64_t dim) {
    const at::Tensor angles = normal({tokens, dim / 2}) * 100;
    const at::Tensor cos = angles.cos(), sin = angles.sin();
    const auto for_x = [](const at::Tensor& table, const at::Tensor& x) {
      return table.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    };
    const auto part = [=](const at::Tensor& x) { return x.slice(1, 1, 1 + heads); };
    return {"rotary",
            {normal({tokens, heads + 2, dim})},
            [=](const Tensors& in) { return rotary(part(in[0]), for_x(cos, in[0]), for_x(sin, in[0])); },
            [=](const Tensors& in) {
              return reference::rotary(part(in[0]), for_x(cos, in[0]), for_x(sin, in[0]));
            },
            normal({tokens, heads, dim})};
  }

  Case product(at::IntArrayRef shape) {
    return {"swiglu",
            {normal(shape) * 4, normal(shape)},
            [](const Tensors& in) { return swiglu(in[0], in[1]); },
            [](const Tensors& in) { return reference::swiglu(in[0], in[1]); },
            normal(shape)};
  }

  std::vector<Case> all(int64_t rows, int64_t width) {
    return {norm({rows, width}), norm_of_sum({rows, width}), rotation(rows, 1, width + width % 2),
            product({rows, width})};
  }

 private:
  at::Generator generator_;
};

/// Calls visit with every instruction set of the machine forced.
void at_every_instruction_set(const std::function<void(const char*)>& visit) {
  int visited = 0;
  for (const char* name : {"default", "avx2", "avx512"}) {
    const testing::ForcedInstructionSet isa(name);
    try {
      instruction_set();
    } catch (const std::runtime_error&) {
      continue;  // not on this machine
    }
    SCOPED_TRACE(name);
    visit(name);
    ++visited;
  }
  EXPECT_GT(visited, 0);
}

/// Puts results behind those of other problems, each behind the same of theirs.
void append(Results& all, const Results& more) {
  all.resize(more.size());
  for (size_t i = 0; i < more.size(); ++i) {
    const at::Tensor flat = more[i].flatten();
    all[i] = all[i].defined() ? at::cat({all[i], flat}) : flat;
  }
}

/// The case with numbers that dtype holds exactly.
Case rounded(Case given, at::ScalarType dtype) {
  given.inputs = cast(cast(given.inputs, dtype), at::kDouble);
  given.grad_out = given.grad_out.to(dtype).to(at::kDouble);
  return given;
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
        for (const Case& given : Cases(++seed).all(rows, width)) {
          const Results plain = given.run_plain();
          at_every_instruction_set([&](const char* isa) {
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
    Cases cases(dim);
    for (const int64_t heads : {1, 9}) {
      const Case rotation = cases.rotation(67, heads, dim), norm = cases.norm({67, heads, dim});
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
        for (const Case& exact : Cases(++seed).all(rows, width)) {
          const Case given = rounded(exact, dtype);
          const Results best = given.run_plain(), plain = given.run_plain(dtype);
          at_every_instruction_set([&](const char* isa) {
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
  at_every_instruction_set([&](const char*) {
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
    for (const Case& given : Cases(7).all(1023, 576)) {
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
  Cases cases(11);
  const auto apart = [](const at::Tensor& tensor) {  // the same numbers, elements and rows apart
    const at::Tensor wide = at::stack({tensor, tensor}, -1).select(-1, 0);
    return tensor.dim() != 2 ? wide : wide.transpose(0, 1).contiguous().transpose(0, 1);
  };
  for (const Case& given : cases.all(65, 80)) {
    Case strided = given;
    for (at::Tensor& input : strided.inputs) input = apart(input);
    strided.grad_out = apart(given.grad_out);
    ASSERT_FALSE(strided.grad_out.is_contiguous());
    const Results expected = given.run(), actual = strided.run();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(expected[i].equal(actual[i])) << given.name;
  }
}

TEST(Elementwise, GradientsAreThoseOfFiniteDifferences) {
  for (const Case& given : Cases(13).all(3, 6)) {
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
  for (const Case& given : Cases(17).all(0, 8)) {
    const Results results = given.run();
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].sizes(), i == 0 ? given.grad_out.sizes() : given.inputs[i - 1].sizes());
      EXPECT_EQ(results[i].abs().sum().item<double>(), 0) << given.name;
    }
  }
}

TEST(Elementwise, GradientsThatNobodyWantsAreLeftOut) {
  const at::Tensor x = Cases(19).normal({5, 8}), weight = at::ones({8}, at::kDouble);
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
