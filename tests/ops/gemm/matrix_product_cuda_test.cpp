// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numbers>

#include "espalier/ops/gemm/matrix_product.h"
#include "tests/ops/comparison.h"
#include "tests/ops/cuda_device.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

// Rounding of exact values: the least error that a result of this dtype can have.
double rounding(const at::Tensor& exact, at::ScalarType dtype) {
  return relative_error(exact.to(dtype), exact);
}

TEST(MatrixProductCuda, IsTheExactOneRoundedOnce) {
  SKIP_WITHOUT_CUDA();
  at::manual_seed(test_seed(11));
  at::globalContext().setAllowBF16ReductionCuBLAS(false);
  struct Sizes {
    int64_t m, k, n;
  };
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const auto& [m, k, n] :
         {Sizes{1, 1, 1}, Sizes{1, 63, 65}, Sizes{65, 1023, 63}, Sizes{1023, 65, 1}, Sizes{65, 1024, 64},
          Sizes{1023, 72, 8}, Sizes{64, 256, 128}, Sizes{128, 8192, 256}}) {
      SCOPED_TRACE(::testing::Message() << dtype << " " << m << " " << k << " " << n);
      const auto options = at::TensorOptions(at::kCUDA).dtype(dtype);
      const at::Tensor a = at::randn({k, m}, options).t(), b = at::randn({k, n}, options);
      const at::Tensor bias = at::randn({n}, options);
      const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
      const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      // What a float32 sum of 8,192 products loses, in tensor cores too; bfloat16 would lose 2e-3.
      const double sums = dtype == at::kDouble ? 1e-13 : 2e-5;
      const at::Tensor product = detail::unrounded_product(a, b);
      const at::Tensor sum = at::ones({m, n}, options.dtype(wide));
      detail::add_product(sum, a, b);
      const at::Tensor affine = detail::affine(a, b.t(), bias), exact_affine = exact + bias.to(at::kDouble);
      EXPECT_EQ(product.scalar_type(), wide);
      EXPECT_EQ(affine.scalar_type(), dtype);
      EXPECT_LE(relative_error(product, exact), sums);
      EXPECT_LE(relative_error(sum, exact + 1), sums);
      // Where sizes are no multiples of 8, which those of models are, cuBLAS may round before it adds the
      // bias.
      const double roundings = k % 8 == 0 && n % 8 == 0 ? 1.05 : 1.05 * std::numbers::sqrt2;
      EXPECT_LE(relative_error(affine, exact_affine), roundings * rounding(exact_affine, dtype) + sums);
    }
  }
}

// Sums in place: nothing of their size beside them, and slices of them too.
TEST(MatrixProductCuda, AddsToRowsOfASum) {
  SKIP_WITHOUT_CUDA();
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor whole = at::zeros({20, 24}, options.dtype(at::kFloat));
  const void* memory = whole.data_ptr();
  const at::Tensor a = at::randn({8, 40}, options), b = at::randn({40, 24}, options);
  for (int i = 0; i < 2; ++i) detail::add_product(whole.slice(0, 4, 12), a, b);
  EXPECT_EQ(whole.data_ptr(), memory);
  EXPECT_LE(relative_error(whole.slice(0, 4, 12), 2 * a.to(at::kDouble).mm(b.to(at::kDouble))), 2e-5);
  EXPECT_EQ(whole.slice(0, 12).abs().sum().item<double>() + whole.slice(0, 0, 4).abs().sum().item<double>(),
            0);
}

}  // namespace
}  // namespace espalier::testing
