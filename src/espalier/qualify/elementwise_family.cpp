// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "espalier/ops/elementwise/elementwise.h"
#include "espalier/ops/operator.h"
#include "espalier/qualify/operator_families.h"
#include "espalier/qualify/problem_numbers.h"

namespace espalier::qualify {
namespace {

using Tensors = std::vector<at::Tensor>;
using Visit = std::function<void(const OperatorProblem&)>;

constexpr double kEps = 0.25;  // large compared to mean squares of 1, so that omitting it is detected

struct RowShape {
  int64_t rows, width;
  MemoryFormat memory_format = MemoryFormat::kPlain;

  std::string text() const {
    constexpr const char* kFormatNames[] = {"", ", not aligned", ", apart in memory"};
    return fmt::format("{} rows of {}{}", rows, width, kFormatNames[static_cast<size_t>(memory_format)]);
  }
};

// Long rows are pooled separately, because they would hide an error in a single head.
constexpr int64_t kHead = 256;

// Sizes of heads and hidden rows, around the sizes of vectors and thread teams.
constexpr RowShape kRowShapes[] = {{65, 63},
                                   {1023, 64},
                                   {70, 65},
                                   {600, 128},
                                   {130, 576},
                                   {33, 1023},
                                   {40, 4096},
                                   {9, 16'384},
                                   {5, 16'391},
                                   {1023, 34},
                                   {300, 1},
                                   {1, 300},
                                   {0, 8},
                                   {51, 80, MemoryFormat::kUnaligned},
                                   {51, 80, MemoryFormat::kApart},
                                   {40, 2048, MemoryFormat::kUnaligned},
                                   {40, 2048, MemoryFormat::kApart}};

/// Calls backward directly in this thread; autograd would use another thread.
std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return detail::call<"swiglu_backward", std::tuple<at::Tensor, at::Tensor>>(grad, gate, up);
}

Tensors norm_call(const Tensors& in) {
  const at::Tensor &x = in[0], &weight = in[1], &grad_y = in[2];
  const RmsNormOutput out = rms_norm_forward(x, {}, weight, kEps);
  const RmsNormGradients grads =
      rms_norm_backward({grad_y, {}, x, weight, out.inverse_rms}, {/*x=*/true, /*weight=*/true});
  return {out.y, grads.x, grads.weight.to(weight.scalar_type())};
}

Tensors plain_norm(const Tensors& in) {
  return with_autograd(
      [](const Tensors& leaves) { return Tensors{reference::rms_norm(leaves[0], leaves[1], kEps)}; },
      {in[0], in[1]}, {in[2]});
}

Tensors norm_of_sum(const Tensors& in) {
  const at::Tensor &x = in[0], &addend = in[1], &weight = in[2], &grad_y = in[3], &grad_sum = in[4];
  const RmsNormOutput out = rms_norm_forward(x, addend, weight, kEps);
  const RmsNormGradients grads =
      rms_norm_backward({grad_y, grad_sum, out.sum, weight, out.inverse_rms}, {/*x=*/true, /*weight=*/true});
  return {out.y, out.sum, grads.x, grads.weight.to(weight.scalar_type())};
}

Tensors plain_norm_of_sum(const Tensors& in) {
  Tensors results = with_autograd(
      [](const Tensors& leaves) {
        const at::Tensor sum = leaves[0] + leaves[1];
        return Tensors{reference::rms_norm(sum, leaves[2], kEps), sum};
      },
      {in[0], in[1], in[2]}, {in[3], in[4]});
  results.erase(results.begin() + 3);  // the gradient of the addend equals that of x
  return results;
}

Tensors rotation(const Tensors& in) {
  return {rotary(in[0], in[1], in[2]), rotary(in[3], in[1], in[2], /*back=*/true)};
}

Tensors plain_rotation(const Tensors& in) {
  return with_autograd(
      [&](const Tensors& leaves) { return Tensors{reference::rotary(leaves[0], in[1], in[2])}; }, {in[0]},
      {in[3]});
}

Tensors gated_product(const Tensors& in) {
  const auto [grad_gate, grad_up] = swiglu_backward(in[2], in[0], in[1]);
  return {swiglu(in[0], in[1]), grad_gate, grad_up};
}

Tensors plain_gated_product(const Tensors& in) {
  return with_autograd([](const Tensors& leaves) { return Tensors{reference::swiglu(leaves[0], leaves[1])}; },
                       {in[0], in[1]}, {in[2]});
}

// Results within a row sum few terms; the weight gradient of a norm sums over all rows.
std::vector<OperatorResult> norm_results(int64_t rows, bool with_sum) {
  std::vector<OperatorResult> results{{"y", kErrorOfFunctions}};
  if (with_sum) results.push_back({"sum"});
  results.push_back({"gradient of x", kErrorOfFunctions});
  results.push_back({"gradient of weight", std::max(error_of_sum(rows), kErrorOfFunctions)});
  return results;
}

void visit_shape(const RowShape& shape, ProblemNumbers numbers, const Visit& visit) {
  const int64_t rows = shape.rows, width = shape.width;
  const auto matrix = [&](double size = 1) { return numbers.elements({rows, width}, size); };
  const OperatorInput weight = numbers.elements({width});
  const auto problem = [&](const std::string& operation) {
    return OperatorProblem{.operation = operation + (width > kHead ? " of wide rows" : ""),
                           .shape = shape.text(),
                           .memory_format = shape.memory_format};
  };
  OperatorProblem one = problem("rms_norm");
  one.inputs = {matrix(), weight, matrix()};
  one.ours = norm_call;
  one.plain = plain_norm;
  one.results = norm_results(rows, /*with_sum=*/false);
  visit(one);
  one = problem("rms_norm of a sum");
  one.inputs = {matrix(), matrix(), weight, matrix(), matrix()};
  one.ours = norm_of_sum;
  one.plain = plain_norm_of_sum;
  one.results = norm_results(rows, /*with_sum=*/true);
  visit(one);
  one = problem("swiglu");
  one.inputs = {matrix(4), matrix(), matrix()};
  one.ours = gated_product;
  one.plain = plain_gated_product;
  one.results = {{"result", kErrorOfFunctions},
                 {"gradient of gate", kErrorOfFunctions},
                 {"gradient of up", kErrorOfFunctions}};
  visit(one);
  constexpr int64_t kHeads = 3;
  const int64_t half = (width + 1) / 2;
  const at::Tensor angles = numbers.normal({rows, half}) * 100;
  one = problem("rotary");
  one.inputs = {numbers.elements({rows, kHeads, 2 * half}), numbers.as_sums(angles.cos()),
                numbers.as_sums(angles.sin()), numbers.elements({rows, kHeads, 2 * half})};
  one.ours = rotation;
  one.plain = plain_rotation;
  one.results = {{"result"}, {"gradient"}};
  visit(one);
}

}  // namespace

OperatorFamily elementwise_family() {
  return {.name = "elementwise",
          .dtypes = {at::kDouble, at::kFloat, at::kBFloat16},
          .for_each_problem = [](at::ScalarType dtype, const Visit& visit) {
            uint64_t seed = 0;
            for (const RowShape& shape : kRowShapes) visit_shape(shape, ProblemNumbers(++seed, dtype), visit);
          }};
}

}  // namespace espalier::qualify
