// SPDX-License-Identifier: Apache-2.0
// The elementwise operators as functions of their differentiable inputs, for comparisons across devices.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "espalier/ops/elementwise/elementwise.h"
#include "tests/ops/comparison.h"
#include "tests/ops/elementwise/reference.h"
#include "tests/test_seed.h"

namespace espalier::testing {

using Tensors = std::vector<at::Tensor>;
using TensorTriple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline TensorTriple call_rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& addend,
                                  const at::Tensor& weight, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("espalier::rms_norm", "")
                             .typed<decltype(call_rms_norm)>();
  return op.call(x, addend, weight, eps);
}

/// An operator as a function of its differentiable inputs, and its plain form. Results of several tensors are
/// joined, so that one gradient reaches all of them.
struct ElementwiseProblem {
  std::string name;
  Tensors inputs;  // float64, on the CPU
  std::function<at::Tensor(const Tensors&)> ours, plain;
  at::Tensor grad_out;

  Results run(at::ScalarType dtype = at::kDouble) const { return run(ours, dtype, at::kCPU); }
  Results run_plain(at::ScalarType dtype = at::kDouble) const { return run(plain, dtype, at::kCPU); }

  /// Results on the CPU, of either function.
  Results run(const std::function<at::Tensor(const Tensors&)>& function, at::ScalarType dtype,
              at::Device device) const {
    Tensors there;
    for (const at::Tensor& input : inputs) there.push_back(input.to(device, dtype));
    Results results;
    for (const at::Tensor& result : with_gradients(function, there, grad_out.to(device, dtype))) {
      results.push_back(result.cpu());
    }
    return results;
  }
};

class ElementwiseProblems {
 public:
  static constexpr double kEps = 0.25;  // large beside mean squares of 1, so that leaving it out shows

  /// Of numbers that dtype holds exactly.
  ElementwiseProblems(uint64_t seed, at::ScalarType dtype)
      : generator_(at::detail::createCPUGenerator(test_seed(seed))), dtype_(dtype) {}

  at::Tensor normal(at::IntArrayRef shape, double size = 1) {
    return at::randn(shape, generator_, at::TensorOptions(at::kDouble)).mul(size).to(dtype_).to(at::kDouble);
  }

  std::vector<ElementwiseProblem> all(int64_t rows, int64_t width) {
    return {norm({rows, width}), norm_of_sum(rows, width), rotation(rows, 3, width + width % 2),
            product(rows, width)};
  }

  ElementwiseProblem norm(at::IntArrayRef shape) {
    return {"norm",
            {normal(shape), normal({shape.back()})},
            [](const Tensors& in) { return std::get<0>(call_rms_norm(in[0], {}, in[1], kEps)); },
            [](const Tensors& in) { return reference::rms_norm(in[0], in[1], kEps); },
            normal(shape)};
  }

  ElementwiseProblem norm_of_sum(int64_t rows, int64_t width) {
    return {"norm of sum",
            {normal({rows, width}), normal({rows, width}), normal({width})},
            [](const Tensors& in) {
              const auto [y, sum, inverse_rms] = call_rms_norm(in[0], in[1], in[2], kEps);
              return at::cat({y, sum});
            },
            [](const Tensors& in) {
              const at::Tensor sum = in[0] + in[1];
              return at::cat({reference::rms_norm(sum, in[2], kEps), sum});
            },
            normal({2 * rows, width})};
  }

  /// Heads as they come from a projection of q, k and v at once.
  ElementwiseProblem rotation(int64_t tokens, int64_t heads, int64_t dim) {
    const at::Tensor angles = normal({tokens, dim / 2}, 100);
    const auto with_tables = [=](const auto& function) {
      return [=](const Tensors& in) {
        const auto dtype = in[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
        // Tables of numbers that float32 holds, in float64 too.
        const auto table = [&](const at::Tensor& t) { return t.to(at::kFloat).to(in[0].device(), dtype); };
        return function(in[0].slice(1, 1, 1 + heads), table(angles.cos()), table(angles.sin()));
      };
    };
    return {"rotary",
            {normal({tokens, heads + 2, dim})},
            with_tables([](const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
              return rotary(x, cos, sin);
            }),
            with_tables([](const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
              return reference::rotary(x, cos, sin);
            }),
            normal({tokens, heads, dim})};
  }

  ElementwiseProblem product(int64_t rows, int64_t width) {
    return {"swiglu",
            {normal({rows, width}, 4), normal({rows, width})},
            [](const Tensors& in) { return swiglu(in[0], in[1]); },
            [](const Tensors& in) { return reference::swiglu(in[0], in[1]); },
            normal({rows, width})};
  }

 private:
  at::Generator generator_;
  at::ScalarType dtype_;
};

/// Judges problems of one shape by their plain form on the CPU: float64 as exact as float64 is, the errors of
/// other dtypes together, by the rule of tests/error_ratio.h.
class ElementwiseJudge {
 public:
  explicit ElementwiseJudge(at::ScalarType dtype) : dtype_(dtype) {}

  /// How many problems to judge. The gradient of a norm's weights has one value for each column, and the
  /// values of a row share the rounding of its mean square.
  int64_t draws(int64_t rows, int64_t width) const {
    return dtype_ == at::kDouble ? 1 : draws_for(std::min(rows, width));
  }

  void add(const ElementwiseProblem& given, const Results& ours) {
    const Results exact = given.run(given.plain, at::kDouble, at::kCPU);
    for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), dtype_) << given.name;
    if (dtype_ == at::kDouble) {
      EXPECT_LE(worst_error(ours, exact), 1e-14) << given.name;
    } else {
      errors_[given.name].add(ours, given.run(given.plain, dtype_, at::kCPU), exact);
    }
  }
  void expect_right() const {
    for (const auto& [name, pool] : errors_) EXPECT_TRUE(pool.at_most_twice_the_plain()) << name;
  }

 private:
  at::ScalarType dtype_;
  std::map<std::string, PooledErrors> errors_;  // by the problem's name
};

}  // namespace espalier::testing
