// The elementwise operators as functions of their differentiable inputs, for comparisons across devices.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "espalier/ops/elementwise.h"
#include "espalier/ops/reference.h"
#include "tests/ops/comparison.h"

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

/// Results of several tensors are joined, so that one gradient reaches all of them.
struct ElementwiseProblem {
  std::string name;
  Tensors inputs;  // float64, on the CPU
  std::function<at::Tensor(const Tensors&)> ours, plain;
  at::Tensor grad_out;

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
  static constexpr double kEps = 0.25;  // beside mean squares of 1: what does without it is found out

  /// Of numbers that dtype holds exactly.
  ElementwiseProblems(uint64_t seed, at::ScalarType dtype)
      : generator_(at::detail::createCPUGenerator(seed)), dtype_(dtype) {}

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

/// Float64 as exact as float64 is, other dtypes with at most twice the error of the plain form on the CPU.
inline void expect_right(const ElementwiseProblem& given, const Results& ours, at::ScalarType dtype) {
  const Results exact = given.run(given.plain, at::kDouble, at::kCPU);
  const Results plain = given.run(given.plain, dtype, at::kCPU);
  ASSERT_EQ(ours.size(), exact.size()) << given.name;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double allowed = dtype == at::kDouble ? 1e-14 : 2 * relative_error(plain[i], exact[i]);
    EXPECT_LE(relative_error(ours[i], exact[i]), allowed) << given.name << ", result " << i;
    EXPECT_EQ(ours[i].scalar_type(), dtype) << given.name << ", result " << i;
  }
}

}  // namespace espalier::testing
