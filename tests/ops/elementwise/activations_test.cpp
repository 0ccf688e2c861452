// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/elementwise/activations.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "tests/ops/comparison.h"
#include "tests/ops/threads.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::PooledErrors;
using testing::relative_error;
using testing::Results;
using testing::same_bits;
using testing::test_seed;
using testing::Threads;
using Activation = std::function<at::Tensor(const at::Tensor&)>;

struct Pair {
  const char* name;
  Activation ours, plain;
};
const Pair kPairs[] = {{"sigmoid", espalier::sigmoid, [](const at::Tensor& x) { return at::sigmoid(x); }},
                       {"softplus", espalier::softplus, [](const at::Tensor& x) { return at::softplus(x); }}};

/// The activation of x and the gradient of x.
Results results_of(const Activation& activation, const at::Tensor& x, const at::Tensor& grad) {
  const at::Tensor input = x.detach().requires_grad_();
  const at::Tensor output = activation(input);
  return {output.detach(), torch::autograd::grad({output}, {input}, {grad})[0]};
}

/// Values of every size, those at which softplus becomes linear among them.
at::Tensor random_inputs(int64_t count) {
  at::manual_seed(test_seed(1));
  const at::Tensor x = at::randn({count}, at::kDouble) * at::logspace(-3, 2, count, 10.0, at::kDouble);
  x.narrow(0, 0, 4).copy_(at::tensor({0.0, 20.0, -800.0, 800.0}, at::kDouble));
  return x;
}

TEST(Activations, EqualAtensInFloat64) {
  const at::Tensor x = random_inputs(5000), grad = at::randn_like(x);
  for (const Pair& pair : kPairs) {
    SCOPED_TRACE(pair.name);
    const Results ours = results_of(pair.ours, x, grad), plain = results_of(pair.plain, x, grad);
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_LE(relative_error(ours[i], plain[i]), 1e-14);
  }
}

TEST(Activations, ErrorInLowPrecisionIsAtMostTwiceThatOfAtens) {
  const at::Tensor x = random_inputs(5000), grad = at::randn_like(x);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor rounded = x.to(dtype), rounded_grad = grad.to(dtype);
    for (const Pair& pair : kPairs) {
      SCOPED_TRACE(pair.name);
      PooledErrors errors;
      errors.add(results_of(pair.ours, rounded, rounded_grad), results_of(pair.plain, rounded, rounded_grad),
                 results_of(pair.plain, rounded.to(at::kDouble), rounded_grad.to(at::kDouble)));
      EXPECT_TRUE(errors.at_most_twice_the_plain()) << dtype;
    }
  }
}

// at::sigmoid and at::softplus would fail this in float32, with more values than one thread takes.
TEST(Activations, AreBitwiseTheSameForAnyNumberOfThreads) {
  const at::Tensor x = random_inputs(100'003), grad = at::randn_like(x);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const Pair& pair : kPairs) {
      SCOPED_TRACE(pair.name);
      const Threads one(1);
      const Results alone = results_of(pair.ours, x.to(dtype), grad.to(dtype));
      const Threads many(3);
      const Results together = results_of(pair.ours, x.to(dtype), grad.to(dtype));
      for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(same_bits(alone[i], together[i])) << dtype << i;
    }
  }
}

TEST(Activations, ExtremesAreFinite) {
  const at::Tensor x = at::tensor({-1e30, -200.0, 0.0, 200.0, 1e30}, at::kFloat), grad = at::ones_like(x);
  for (const Pair& pair : kPairs) {
    for (const at::Tensor& result : results_of(pair.ours, x, grad)) {
      EXPECT_TRUE(result.isfinite().all().item<bool>()) << pair.name;
    }
  }
}

/// GeGLU of the halves of x [2, N], and as Transformers' Gemma3MLP has it.
at::Tensor ours_geglu(const at::Tensor& x) {
  return geglu(x[0], x[1]);
}

at::Tensor plain_geglu(const at::Tensor& x) {
  return at::gelu(x[0], "tanh") * x[1];
}

/// Gates of every size, and ups.
at::Tensor random_pairs(int64_t count) {
  const at::Tensor gates = random_inputs(count);
  return at::stack({gates, at::randn_like(gates)});
}

TEST(Geglu, EqualsThePlainForm) {
  const at::Tensor x = random_pairs(5000), grad = at::randn_like(x[0]);
  const Results ours = results_of(ours_geglu, x, grad), plain = results_of(plain_geglu, x, grad);
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_LE(relative_error(ours[i], plain[i]), 1e-14);
  const Results other =
      results_of([](const at::Tensor& in) { return at::gelu(in[0], "none") * in[1]; }, x, grad);
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_GT(relative_error(ours[i], other[i]), 1e-6);
}

TEST(Geglu, ErrorInLowPrecisionIsAtMostTwiceThatOfThePlainForm) {
  const at::Tensor x = random_pairs(5000), grad = at::randn_like(x[0]);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor rounded = x.to(dtype), rounded_grad = grad.to(dtype);
    const PooledErrors errors(results_of(ours_geglu, rounded, rounded_grad),
                              results_of(plain_geglu, rounded, rounded_grad),
                              results_of(plain_geglu, rounded.to(at::kDouble), rounded_grad.to(at::kDouble)));
    EXPECT_TRUE(errors.at_most_twice_the_plain()) << dtype;
  }
}

TEST(Geglu, IsBitwiseTheSameForAnyNumberOfThreads) {
  const at::Tensor x = random_pairs(100'003), grad = at::randn_like(x[0]);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Threads one(1);
    const Results alone = results_of(ours_geglu, x.to(dtype), grad.to(dtype));
    const Threads many(3);
    const Results together = results_of(ours_geglu, x.to(dtype), grad.to(dtype));
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(same_bits(alone[i], together[i])) << dtype << i;
  }
}

TEST(Geglu, ExtremesAreFiniteAndOtherArgumentsRefused) {
  const at::Tensor gate = at::tensor({-1e30, -200.0, 0.0, 200.0, 1e30}, at::kFloat);
  const at::Tensor x = at::stack({gate, at::ones_like(gate)});
  for (const at::Tensor& result : results_of(ours_geglu, x, at::ones_like(gate))) {
    EXPECT_TRUE(result.isfinite().all().item<bool>());
  }
  EXPECT_THROW(geglu(at::randn({4}), at::randn({5})), c10::Error);
  EXPECT_THROW(geglu(at::randn({4}), at::randn({4}, at::kDouble)), c10::Error);
}

constexpr double kAlpha = 1.702, kLimit = 2.5;

at::Tensor ours_clamped(const at::Tensor& x) {
  return clamped_swiglu(x, kAlpha, kLimit);
}

/// As GptOssExperts in Transformers has it.
at::Tensor plain_clamped(const at::Tensor& x) {
  const at::Tensor gate = x.slice(1, 0, std::nullopt, 2).clamp_max(kLimit);
  const at::Tensor up = x.slice(1, 1, std::nullopt, 2).clamp(-kLimit, kLimit);
  return (up + 1) * (gate * at::sigmoid(gate * kAlpha));
}

/// Rows of gate and up, some beyond the limits, some at them.
at::Tensor random_gate_up(int64_t rows, int64_t columns) {
  at::manual_seed(test_seed(2));
  const at::Tensor x = 3 * at::randn({rows, columns}, at::kDouble);
  x[0].narrow(0, 0, 6).copy_(at::tensor({kLimit, kLimit, -kLimit, -kLimit, 40.0, -40.0}, at::kDouble));
  return x;
}

TEST(ClampedSwiglu, EqualsThePlainForm) {
  const at::Tensor x = random_gate_up(50, 14), grad = at::randn({50, 7}, at::kDouble);
  const Results ours = results_of(ours_clamped, x, grad), plain = results_of(plain_clamped, x, grad);
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_LE(relative_error(ours[i], plain[i]), 1e-14);
  EXPECT_EQ(ours_clamped(at::empty({0, 6}, at::kDouble)).sizes(), at::IntArrayRef({0, 3}));
}

TEST(ClampedSwiglu, ErrorInLowPrecisionIsAtMostTwiceThatOfThePlainForm) {
  const at::Tensor x = random_gate_up(80, 30), grad = at::randn({80, 15}, at::kDouble);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor rounded = x.to(dtype), rounded_grad = grad.to(dtype);
    const PooledErrors errors(
        results_of(ours_clamped, rounded, rounded_grad), results_of(plain_clamped, rounded, rounded_grad),
        results_of(plain_clamped, rounded.to(at::kDouble), rounded_grad.to(at::kDouble)));
    EXPECT_TRUE(errors.at_most_twice_the_plain()) << dtype;
  }
}

TEST(ClampedSwiglu, IsBitwiseTheSameForAnyNumberOfThreads) {
  const at::Tensor x = random_gate_up(2001, 94), grad = at::randn({2001, 47}, at::kDouble);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Threads one(1);
    const Results alone = results_of(ours_clamped, x.to(dtype), grad.to(dtype));
    const Threads many(3);
    const Results together = results_of(ours_clamped, x.to(dtype), grad.to(dtype));
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(same_bits(alone[i], together[i])) << dtype << i;
  }
}

TEST(ClampedSwiglu, NegativeControls) {
  const at::Tensor x = random_gate_up(50, 14), grad = at::randn({50, 7}, at::kDouble);
  const Results plain = results_of(plain_clamped, x, grad);
  const auto errors_of = [&](const Activation& activation) {
    const Results wrong = results_of(activation, x, grad);
    return std::min(relative_error(wrong[0], plain[0]), relative_error(wrong[1], plain[1]));
  };
  EXPECT_LE(errors_of(ours_clamped), 1e-14);
  EXPECT_GT(errors_of([](const at::Tensor& in) { return clamped_swiglu(in, kAlpha, 1e9); }), 1e-2);
  EXPECT_GT(errors_of([](const at::Tensor& in) { return clamped_swiglu(in, 1, kLimit); }), 1e-2);
  // All gates before all ups.
  EXPECT_GT(
      errors_of([](const at::Tensor& in) { return ours_clamped(at::stack(in.chunk(2, 1), 2).flatten(1)); }),
      1e-2);
  // Up without the 1.
  EXPECT_GT(errors_of([](const at::Tensor& in) {
              const at::Tensor gate = in.slice(1, 0, std::nullopt, 2).clamp_max(kLimit);
              return ours_clamped(in) - gate * at::sigmoid(kAlpha * gate);
            }),
            1e-2);
}

TEST(ClampedSwiglu, RefusesWrongArguments) {
  EXPECT_THROW(clamped_swiglu(at::randn({4, 5}), kAlpha, kLimit), c10::Error);
  EXPECT_THROW(clamped_swiglu(at::randn({6}), kAlpha, kLimit), c10::Error);
  EXPECT_THROW(clamped_swiglu(at::randn({4, 6}), kAlpha, 0), c10::Error);
  EXPECT_THROW(clamped_swiglu(at::randn({4, 6}).to(at::kHalf), kAlpha, kLimit), c10::Error);
}

}  // namespace
}  // namespace espalier
