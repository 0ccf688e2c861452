// SPDX-License-Identifier: Apache-2.0
// What runs on GPUs, tested on the CPU.
#include "espalier/ops/elementwise/composed.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/ops/elementwise/elementwise_problems.h"

namespace espalier::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16};

at::Tensor for_sums(const at::Tensor& x) {
  return x.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

/// Result and gradients of a problem by the compositions, which have no graph.
Results run_composed(const ElementwiseProblem& given, at::ScalarType dtype) {
  const Tensors in = cast(given.inputs, dtype);
  const at::Tensor grad = given.grad_out.to(dtype);
  if (given.name == "swiglu") {
    const auto [gate, up] = composed::swiglu_backward(grad, in[0], in[1]);
    return {composed::swiglu(in[0], in[1]), gate, up};
  }
  const bool has_addend = given.name == "norm of sum";
  const at::Tensor& weight = in.back();
  const auto [y, sum, inverse] = composed::rms_norm(in[0], has_addend ? std::optional(in[1]) : std::nullopt,
                                                    weight, ElementwiseProblems::kEps);
  EXPECT_EQ(inverse.scalar_type(), for_sums(y).scalar_type());
  if (!has_addend) {
    const auto [x, w] = composed::rms_norm_backward(grad, {}, in[0], weight, inverse, {true, true});
    return {y, x, w.to(dtype)};
  }
  const std::vector<at::Tensor> grads = grad.chunk(2);
  const auto [x, w] = composed::rms_norm_backward(grads[0], grads[1], sum, weight, inverse, {true, true});
  return {at::cat({y, sum}), x, x, w.to(dtype)};
}

TEST(ElementwiseComposed, EqualTheReference) {
  for (const at::ScalarType dtype : kDtypes) {
    uint64_t seed = 0;
    for (const int64_t width : {1, 2, 63, 64, 576}) {
      SCOPED_TRACE(::testing::Message() << dtype << ", from seed " << seed + 1 << " on, rows of " << width);
      ElementwiseJudge judge(dtype);
      for (int64_t draw = judge.draws(101, width); draw > 0; --draw) {
        ElementwiseProblems problems(++seed, dtype);
        for (const ElementwiseProblem& given :
             {problems.norm({101, width}), problems.norm_of_sum(101, width), problems.product(101, width)}) {
          judge.add(given, run_composed(given, dtype));
        }
      }
      judge.expect_right();
    }
  }
}

TEST(ElementwiseComposed, RotationsEqualTheOperatorsBothWays) {
  for (const at::ScalarType dtype : kDtypes) {
    const at::Tensor x = ElementwiseProblems(5, dtype).normal({17, 3, 16}).to(dtype);
    const at::Tensor angles = for_sums(x).select(1, 0).slice(1, 0, 8) * 50;
    for (const bool back : {false, true}) {
      const at::Tensor ours = composed::rotary(x, angles.cos(), angles.sin(), back);
      EXPECT_LE(relative_error(ours, rotary(x, angles.cos(), angles.sin(), back)),
                dtype == at::kDouble  ? 1e-15
                : dtype == at::kFloat ? 1e-7
                                      : 1e-3);
      EXPECT_EQ(ours.scalar_type(), dtype);
    }
  }
}

// What is registered for CUDA computes on any device: here on the CPU's tensors.
TEST(ElementwiseComposed, AreTheOperatorsOfCuda) {
  using Product = at::Tensor(const at::Tensor&, const at::Tensor&);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("espalier::swiglu", "").typed<Product>();
  const at::Tensor gate = at::randn({5, 7}), up = at::randn({5, 7});
  const c10::DispatchKeySet cuda(c10::DispatchKey::CUDA);
  EXPECT_TRUE(op.redispatch(cuda, gate, up).equal(composed::swiglu(gate, up)));
  for (const char* name : {"rms_norm", "rms_norm_backward", "rotary", "swiglu_backward"}) {
    const auto other =
        c10::Dispatcher::singleton().findSchemaOrThrow((std::string("espalier::") + name).c_str(), "");
    EXPECT_TRUE(other.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) << name;
  }
}

// Elements apart, rows apart, transposed; results are contiguous all the same.
TEST(ElementwiseComposed, TakeTensorsOfAnyStrides) {
  const at::Tensor memory = at::randn({4, 24, 24}, at::kBFloat16), weight = at::randn({16}, at::kBFloat16);
  const auto expect_same = [](const at::Tensor& result, const at::Tensor& plain) {
    EXPECT_TRUE(result.is_contiguous() && same_bits(result, plain));
  };
  for (const auto& view : std::vector<std::function<at::Tensor(const at::Tensor&)>>{
           [](const at::Tensor& x) { return x.slice(1, 3, 19); },
           [](const at::Tensor& x) { return x.slice(0, 2, 18).t(); },
           [](const at::Tensor& x) { return x.repeat({1, 2}).slice(1, 0, 32, 2); }}) {
    const auto given = [&](int64_t i) { return view(memory[i]); };
    const auto plain = [&](int64_t i) { return view(memory[i]).clone(at::MemoryFormat::Contiguous); };
    const auto [y, sum, inverse] = composed::rms_norm(given(0), given(1), weight, 0.1);
    const auto [plain_y, plain_sum, plain_inverse] = composed::rms_norm(plain(0), plain(1), weight, 0.1);
    expect_same(y, plain_y);
    expect_same(sum, plain_sum);
    const auto [x, w] =
        composed::rms_norm_backward(given(0), given(1), given(2), weight, inverse, {true, true});
    const auto [plain_x, plain_w] =
        composed::rms_norm_backward(plain(0), plain(1), plain(2), weight, inverse, {true, true});
    EXPECT_TRUE(x.is_contiguous() && w.is_contiguous());
    EXPECT_LE(relative_error(x, plain_x), 1e-2);  // products of matrices add up in another order
    EXPECT_LE(relative_error(w, plain_w), 1e-6);
    expect_same(composed::swiglu(given(0), given(1)), composed::swiglu(plain(0), plain(1)));
    const auto [gate, up] = composed::swiglu_backward(given(0), given(1), given(2));
    const auto [plain_gate, plain_up] = composed::swiglu_backward(plain(0), plain(1), plain(2));
    expect_same(gate, plain_gate);
    expect_same(up, plain_up);
    const at::Tensor angles = at::rand({plain(0).size(0), 8});
    expect_same(composed::rotary(given(0).unsqueeze(1), angles.cos(), angles.sin(), false),
                composed::rotary(plain(0).unsqueeze(1), angles.cos(), angles.sin(), false));
  }
}

TEST(ElementwiseComposed, GradientsThatNobodyWantsAreLeftOut) {
  const at::Tensor x = at::randn({5, 8}), weight = at::ones({8});
  const at::Tensor inverse = std::get<2>(composed::rms_norm(x, {}, weight, 0.1));
  EXPECT_FALSE(std::get<0>(composed::rms_norm_backward(x, {}, x, weight, inverse, {false, true})).defined());
  EXPECT_FALSE(std::get<1>(composed::rms_norm_backward(x, {}, x, weight, inverse, {true, false})).defined());
}

}  // namespace
}  // namespace espalier::testing
