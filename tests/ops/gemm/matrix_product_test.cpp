// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gemm/matrix_product.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "espalier/ops/gemm/prepared_weight.h"
#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "tests/ops/comparison.h"
#include "tests/ops/gemm/forced_products.h"
#include "tests/ops/kernels/cpu/forced_instruction_set.h"
#include "tests/ops/threads.h"
#include "tests/torch_seed.h"

namespace espalier::testing {
namespace {

struct ProductSizes {
  int64_t m, k, n;
};
constexpr ProductSizes kProductSizes[] = {{1, 1, 1},      {1, 63, 65},   {63, 1, 1023},
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

void expect_exact_products() {
  seed_torch(11);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const auto& [m, k, n] : kProductSizes) {
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
        const bool exact_sums = !detail::rounds_products(a);
        const at::Tensor unrounded_product = detail::unrounded_product(a, b);
        at::Tensor sum = at::ones({m, n}, wide);
        detail::add_product(sum, a, b);
        EXPECT_EQ(unrounded_product.scalar_type(), wide);
        const double allowed = sums + (exact_sums ? 0 : 1.01 * rounding(exact, dtype));
        EXPECT_LE(error(unrounded_product, exact), allowed);
        EXPECT_LE(error(sum, exact + 1), allowed + sums);

        const detail::PreparedWeight prepared(b.t());
        EXPECT_TRUE(prepared.affine(a, {}).equal(plain));
        EXPECT_TRUE(prepared.affine(a, bias).equal(affine));
        EXPECT_TRUE(prepared.unrounded(a).equal(unrounded_product));
      }
    }
  }
}

TEST(MatrixProduct, IsTheExactOneRoundedOnce) {
  expect_exact_products();  // as this machine has it
  for (const ProductChoice& choice : kProductChoices) {
    SCOPED_TRACE(to_string(choice));
    for (const char* name : {"default", "avx2", "avx512", "avx512_bf16"}) {
      const ForcedInstructionSet forced_set(name);
      try {
        instruction_set();
      } catch (const std::runtime_error&) {
        continue;  // not on this machine
      }
      SCOPED_TRACE(name);
      const KernelScope forced(with_products(choice));
      expect_exact_products();
    }
  }
}

// Sums of more than 2,048 words are cut in another way than where they are added to (panel_product.cpp).
TEST(MatrixProduct, OfAPreparedWeightWithLongSums) {
  seed_torch(12);
  const at::Tensor a = at::randn({5, 5001}), weight = at::randn({37, 5001});
  for (const ProductChoice& choice : kProductChoices) {
    const KernelScope forced(with_products(choice));
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor x = a.to(dtype), w = weight.to(dtype);
      const at::Tensor of_rounded = x.to(at::kDouble).mm(w.to(at::kDouble).t());
      const double once = detail::rounds_products(x) ? 1.01 * rounding(of_rounded, dtype) : 0;
      const double sums = 3e-7 * a.norm().item<double>() * weight.norm().item<double>();
      EXPECT_LE(error(detail::PreparedWeight(w).unrounded(x), of_rounded), sums + once)
          << to_string(choice) << " " << dtype;
    }
  }
}

// Products of one kind have one result, whoever computes them and whatever is computed with them: else two
// runs would differ, and a branch of a tree would depend on its neighbours.
TEST(MatrixProduct, OfPanelsHasTheSameBitsForAnyThreadsAndRows) {
  seed_torch(13);
  const KernelScope forced(with_products({Float32Products::kPanels, Bfloat16Products::kNative}));
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = at::randn({1300, 700}).to(dtype), weight = at::randn({300, 700}).to(dtype);
    const at::Tensor grad = at::randn({5000, 300}).to(dtype), tall = at::randn({5000, 90}).to(dtype);
    const auto results = [&] {
      const at::Tensor sum = at::ones({300, 90});
      detail::add_product(sum, grad.t(), tall);
      const detail::PreparedWeight prepared(weight);
      return Results{detail::affine(x, weight, {}), detail::unrounded_product(x, weight.t()), sum,
                     prepared.affine(x, {}), prepared.affine(x.slice(0, 7, 8), {})};
    };
    Results one;
    {
      const Threads threads(1);
      one = results();
    }
    for (const int count : {2, 2, 5}) {
      const Threads threads(count);
      const Results more = results();
      for (size_t i = 0; i < one.size(); ++i) {
        EXPECT_TRUE(same_bits(one[i], more[i])) << dtype << ", " << count << " threads, result " << i;
      }
    }
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {7, 20}, {1000, 1300}}) {
      EXPECT_TRUE(same_bits(detail::affine(x.slice(0, begin, end), weight, {}), one[0].slice(0, begin, end)));
    }
  }
}

// Columns of a larger matrix, and results that are one.
TEST(MatrixProduct, TakesPartsOfMatricesAndWritesNothingElse) {
  seed_torch(14);
  for (const ProductChoice& choice : kProductChoices) {
    SCOPED_TRACE(to_string(choice));
    const KernelScope forced(with_products(choice));
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor a = at::randn({40, 50}).to(dtype).slice(1, 3, 43, 2);
      const at::Tensor b = at::randn({50, 60}).to(dtype).slice(0, 5, 25).slice(1, 7, 52);
      const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble)) + 1;
      for (const bool transposed : {false, true}) {
        const at::Tensor whole = at::ones({60, 60});
        const at::Tensor place =
            transposed ? whole.slice(0, 8, 53).slice(1, 9, 49).t() : whole.slice(0, 9, 49).slice(1, 8, 53);
        detail::add_product(place, a, b);
        EXPECT_LE(relative_error(place, exact), detail::rounds_products(a) ? 4e-3 : 1e-6);
        place.fill_(1);
        EXPECT_TRUE(whole.equal(at::ones({60, 60})));
      }
    }
  }
}

TEST(MatrixProduct, OfNothingIsZero) {
  for (const ProductChoice& choice : kProductChoices) {
    const KernelScope forced(with_products(choice));
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor bias = at::ones({4}).to(dtype);
      EXPECT_TRUE(detail::affine(at::ones({3, 0}).to(dtype), at::ones({4, 0}).to(dtype), bias)
                      .equal(at::ones({3, 4}).to(dtype)));
      EXPECT_TRUE(detail::unrounded_product(at::ones({3, 0}).to(dtype), at::ones({0, 4}).to(dtype))
                      .equal(at::zeros({3, 4})));
      EXPECT_EQ(detail::affine(at::ones({0, 5}).to(dtype), at::ones({4, 5}).to(dtype), bias).numel(), 0);
    }
  }
}

// A factor that is computed in the dtype of products already, as the gradients of logits are.
TEST(MatrixProduct, TakesAWideFactor) {
  seed_torch(12);
  const at::Tensor a = at::randn({5, 7}).to(detail::product_dtype(at::empty({}, at::kBFloat16)));
  const at::Tensor b = at::randn({7, 3}).to(at::kBFloat16);
  const at::Tensor sum = at::zeros({5, 3});
  detail::add_product(sum, a, b);
  EXPECT_LE(error(sum, a.to(at::kDouble).mm(b.to(at::kDouble))), a.scalar_type() == at::kFloat ? 1e-5 : 0.1);
}

TEST(MatrixProduct, DtypesAreThoseOfTheChoice) {
  const at::Tensor narrow = at::empty({}, at::kBFloat16);
  for (const ProductChoice& choice : kProductChoices) {
    const KernelScope forced(with_products(choice));
    EXPECT_EQ(product_choice(), choice);
    const bool upcast = choice.bfloat16 == Bfloat16Products::kUpcast;
    EXPECT_EQ(detail::product_dtype(narrow), upcast ? at::kFloat : at::kBFloat16);
    EXPECT_EQ(detail::rounds_products(narrow), choice.bfloat16 == Bfloat16Products::kLibrary);
    EXPECT_FALSE(detail::rounds_products(at::empty({})));
  }
  EXPECT_EQ(product_choice(),
            with_environment(choose_by_features(product_features()).value_or(ProductChoice())));
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    EXPECT_EQ(detail::product_dtype(at::empty({}, dtype)), dtype);
  }
}

}  // namespace
}  // namespace espalier::testing
