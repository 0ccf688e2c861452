// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/elementwise/activations.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

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

}  // namespace
}  // namespace espalier
