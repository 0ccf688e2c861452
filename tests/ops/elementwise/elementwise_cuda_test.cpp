// SPDX-License-Identifier: Apache-2.0
// The elementwise operators on a GPU.
#include <gtest/gtest.h>

#include "tests/ops/cuda_device.h"
#include "tests/ops/elementwise/elementwise_problems.h"
#include "tests/ops/elementwise/reference.h"

namespace espalier::testing {
namespace {

struct Shape {
  int64_t rows, width;
};

// Heads and hidden rows, of odd sizes and large ones.
constexpr Shape kShapes[] = {{65, 63},   {1023, 64},  {70, 65},   {20'000, 128}, {3001, 256}, {130, 576},
                             {33, 1023}, {257, 4096}, {41, 8192}, {9, 16'384},   {5, 16'391}, {1023, 34}};

TEST(ElementwiseCuda, EqualTheReference) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    uint64_t seed = 0;
    for (const Shape& shape : kShapes) {
      SCOPED_TRACE(::testing::Message() << dtype << ", from seed " << seed + 1 << " on, " << shape.rows
                                        << " rows of " << shape.width);
      ElementwiseJudge judge(dtype);
      for (int64_t draw = judge.draws(shape.rows, shape.width); draw > 0; --draw) {
        ElementwiseProblems problems(++seed, dtype);
        for (const ElementwiseProblem& given : problems.all(shape.rows, shape.width)) {
          judge.add(given, given.run(given.ours, dtype, at::kCUDA));
        }
      }
      judge.expect_right();
    }
  }
}

TEST(ElementwiseCuda, NormsOfHeads) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const int64_t dim : {64, 80, 128, 256}) {
      ElementwiseJudge judge(dtype);
      for (int64_t draw = judge.draws(301, dim); draw > 0; --draw) {
        const ElementwiseProblem given = ElementwiseProblems(1000 * draw + dim, dtype).norm({301, 9, dim});
        judge.add(given, given.run(given.ours, dtype, at::kCUDA));
      }
      judge.expect_right();
    }
  }
}

TEST(ElementwiseCuda, HaveTheSameBitsFromRunToRun) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const Shape& shape : {Shape{20'000, 128}, Shape{5000, 576}, Shape{1001, 4096}}) {
      for (const ElementwiseProblem& given : ElementwiseProblems(7, dtype).all(shape.rows, shape.width)) {
        const Results first = given.run(given.ours, dtype, at::kCUDA);
        for (int run = 0; run < 3; ++run) {
          const Results again = given.run(given.ours, dtype, at::kCUDA);
          for (size_t i = 0; i < first.size(); ++i) {
            EXPECT_TRUE(same_bits(first[i], again[i])) << given.name << ", " << dtype << ", result " << i;
          }
        }
      }
    }
  }
}

// Every number by itself: an error of one range would drown in a norm over all.
TEST(ElementwiseCuda, SwigluInFloat32IsAccurateForGatesOfAllSizes) {
  SKIP_WITHOUT_CUDA();
  const at::Tensor gate = at::linspace(-86, 100, 200'001, at::kFloat), up = at::ones_like(gate);
  const at::Tensor exact = gate.to(at::kDouble) / (1 + (-gate.to(at::kDouble)).exp());
  const at::Tensor error = ((swiglu(gate.to(at::kCUDA), up.to(at::kCUDA)).cpu() - exact) / exact).abs();
  EXPECT_LE(error.masked_select(gate != 0).max().item<double>(), 8 * 0x1p-24);
}

TEST(ElementwiseCuda, SwigluOfExtremesIsThatOfTheReference) {
  SKIP_WITHOUT_CUDA();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor gate =
        at::tensor({-kInfinity, -1000.f, -90.f, 0.f, 1000.f, kInfinity, std::nanf("")}).to(dtype);
    const at::Tensor up = at::ones_like(gate), plain = reference::swiglu(gate, up);
    // What is below the normal numbers may be 0.
    EXPECT_TRUE(swiglu(gate.to(at::kCUDA), up.to(at::kCUDA)).cpu().allclose(plain, 0, 0x1p-120, true))
        << dtype;
  }
}

// Elements apart and rows apart.
TEST(ElementwiseCuda, TakeTensorsOfAnyStrides) {
  SKIP_WITHOUT_CUDA();
  const auto cuda = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor memory = at::randn({3, 64, 96}, cuda), weight = at::randn({80}, cuda);
  const auto check = [&](const at::Tensor& x, const at::Tensor& other) {
    const auto rows = rms_norm_forward(x, other, weight, 0.1);
    const auto plain = rms_norm_forward(x.clone().contiguous(), other.clone().contiguous(), weight, 0.1);
    EXPECT_TRUE(same_bits(rows.y, plain.y));
    EXPECT_TRUE(same_bits(rows.sum, plain.sum));
    EXPECT_TRUE(same_bits(swiglu(x, other), swiglu(x.clone().contiguous(), other.clone().contiguous())));
  };
  check(memory[0].slice(1, 0, 80), memory[1].slice(1, 3, 83));
  check(memory[0]
            .t()
            .slice(0, 0, 64)
            .slice(1, 0, 64)
            .contiguous()
            .view({-1})
            .slice(0, 1, 1 + 51 * 80)
            .view({51, 80}),
        memory[2].view({-1}).slice(0, 5, 5 + 51 * 80).view({51, 80}));
  const at::Tensor heads = at::randn({40, 5, 3, 64}, cuda),
                   angles = at::randn({40, 32}, cuda.dtype(at::kFloat));
  for (const at::Tensor& x : {heads.select(2, 1), heads.select(2, 0).slice(1, 1, 3), heads.select(1, 2)}) {
    EXPECT_TRUE(same_bits(rotary(x, angles.cos(), angles.sin()),
                          rotary(x.clone().contiguous(), angles.cos(), angles.sin())));
  }
}

TEST(ElementwiseCuda, TakeNoRows) {
  SKIP_WITHOUT_CUDA();
  for (const ElementwiseProblem& given : ElementwiseProblems(17, at::kFloat).all(0, 8)) {
    const Results results = given.run(given.ours, at::kFloat, at::kCUDA);
    for (size_t i = 1; i < results.size(); ++i) {
      EXPECT_EQ(results[i].sizes(), given.inputs[i - 1].sizes());
      EXPECT_EQ(results[i].abs().sum().item<double>(), 0) << given.name;
    }
  }
}

}  // namespace
}  // namespace espalier::testing
