#include "espalier/ops/matrix_product.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "espalier/ops/kernels/cpu_level.h"
#include "tests/ops/kernels/forced_level.h"

namespace espalier::testing {
namespace {

struct Sizes {
  int64_t m, k, n;
};
constexpr Sizes kSizes[] = {{1, 1, 1},      {1, 63, 65},   {63, 1, 1023},
                            {65, 1023, 63}, {1023, 65, 1}, {64, 256, 128}};

at::Tensor matrix(int64_t rows, int64_t columns, at::ScalarType dtype, bool transposed) {
  const at::Tensor values = transposed ? at::randn({columns, rows}).t() : at::randn({rows, columns});
  return values.to(dtype);
}

double error(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
}

// Rounding of exact values: the least error that a result of this dtype can have.
double rounding(const at::Tensor& exact, at::ScalarType dtype) {
  return error(exact.to(dtype), exact);
}

TEST(MatrixProduct, IsTheExactOneRoundedOnce) {
  at::manual_seed(11);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const auto& [m, k, n] : kSizes) {
      for (const bool transposed : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << at::toString(dtype) << " " << m << " " << k << " " << n << " " << transposed);
        const at::Tensor a = matrix(m, k, dtype, transposed), b = matrix(k, n, dtype, !transposed);
        const at::Tensor bias = at::randn({n}).to(dtype);
        const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
        const at::Tensor exact_affine = exact + bias.to(at::kDouble);
        const double scale =
            a.to(at::kDouble).norm().item<double>() * b.to(at::kDouble).norm().item<double>();
        const double sums = scale * (dtype == at::kDouble ? 1e-15 : 3e-7);

        const at::Tensor plain = detail::affine(a, b.t(), {}), affine = detail::affine(a, b.t(), bias);
        EXPECT_EQ(plain.scalar_type(), dtype);
        EXPECT_EQ(affine.scalar_type(), dtype);
        EXPECT_LE(error(plain, exact), 1.01 * rounding(exact, dtype) + sums);
        EXPECT_LE(error(affine, exact_affine), 1.01 * rounding(exact_affine, dtype) + sums);

        const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
        const bool exact_sums = detail::product_dtype(a) == wide;
        const at::Tensor wide_product = detail::wide_product(a, b);
        at::Tensor sum = at::ones({m, n}, wide);
        detail::add_product(sum, a, b);
        EXPECT_EQ(wide_product.scalar_type(), wide);
        const double allowed = sums + (exact_sums ? 0 : 1.01 * rounding(exact, dtype));
        EXPECT_LE(error(wide_product, exact), allowed);
        EXPECT_LE(error(sum, exact + 1), allowed + sums);
      }
    }
  }
}

// A factor that is computed in the dtype of products already, as the gradients of logits are.
TEST(MatrixProduct, TakesAWideFactor) {
  at::manual_seed(12);
  const at::Tensor a = at::randn({5, 7}).to(detail::product_dtype(at::empty({}, at::kBFloat16)));
  const at::Tensor b = at::randn({7, 3}).to(at::kBFloat16);
  const at::Tensor sum = at::zeros({5, 3});
  detail::add_product(sum, a, b);
  EXPECT_LE(error(sum, a.to(at::kDouble).mm(b.to(at::kDouble))), a.scalar_type() == at::kFloat ? 1e-5 : 0.1);
}

TEST(MatrixProduct, Bfloat16IsWidenedWithoutAmx) {
  const CpuLevel best = cpu_level();
  const at::Tensor narrow = at::empty({}, at::kBFloat16);
  EXPECT_EQ(detail::product_dtype(narrow), best >= CpuLevel::kAmx ? at::kBFloat16 : at::kFloat);
  {
    const ForcedLevel level("default");
    EXPECT_EQ(detail::product_dtype(narrow), at::kFloat);
  }
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    EXPECT_EQ(detail::product_dtype(at::empty({}, dtype)), dtype);
  }
}

}  // namespace
}  // namespace espalier::testing
