// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/products/panel_math.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "espalier/ops/kernels/cpu/products/blocked_product.h"
#include "tests/ops/kernels/cpu/instruction_sets.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

float value_of(BFloat16 x) {
  return std::bit_cast<float>(uint32_t{x.bits} << 16);
}

float value_of(float x) {
  return x;
}

// Of a float that bfloat16 holds.
BFloat16 bfloat16(float x) {
  return {static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16)};
}

/// A matrix whose rows, or whose columns, lie in one piece, with room between them.
template <class Element>
struct Matrix {
  int64_t rows, columns;
  bool by_columns;
  std::vector<Element> data;

  Matrix(int64_t rows, int64_t columns, bool by_columns, std::mt19937_64& random)
      : rows(rows), columns(columns), by_columns(by_columns), data((rows + 3) * (columns + 3)) {
    for (Element& element : data) {
      // Eight bits: bfloat16 holds them.
      const float x = static_cast<float>(std::uniform_int_distribution<int>(-128, 127)(random)) / 64;
      if constexpr (std::is_same_v<Element, float>) {
        element = x * 1.001f;
      } else {
        element = bfloat16(x);
      }
    }
  }
  int64_t stride() const { return by_columns ? rows + 3 : columns + 3; }
  double at(int64_t r, int64_t c) const {
    return value_of(data[by_columns ? c * stride() + r : r * stride() + c]);
  }
  Vectors<Element> row_vectors() const {
    return {data.data(), by_columns ? 1 : stride(), by_columns ? stride() : 1, rows, columns};
  }
  Vectors<Element> column_vectors() const {
    return {data.data(), by_columns ? stride() : 1, by_columns ? 1 : stride(), columns, rows};
  }
};

constexpr float kUntouched = 12345.0f;

template <class Element, class Result = float>
std::vector<Result> multiplied(const Matrix<Element>& a, const Matrix<Element>& b, InstructionSet isa,
                               int64_t threads, int64_t stride, float before) {
  using Word = WordOf<Element>;
  const BlockedProduct<Element> product(a.row_vectors(), b.column_vectors(), isa, threads);
  // Left over from others: nothing of it may show.
  const Word noise = std::bit_cast<Word>(std::numeric_limits<float>::quiet_NaN());
  std::vector<Word> packed(product.packed_words(), noise),
      scratch(product.scratch_words(!std::is_same_v<Result, float>), noise);
  for (int64_t task = 0; task < product.num_pack_tasks(); ++task) product.pack(task, packed.data());
  std::vector<Result> c(a.rows * stride);
  for (int64_t i = 0; i < a.rows * stride; ++i) {
    const float value = i % stride < b.columns ? before : kUntouched;
    if constexpr (std::is_same_v<Result, float>) {
      c[i] = value;
    } else {
      c[i] = bfloat16(value);
    }
  }
  for (int64_t task = 0; task < product.num_tasks(); ++task) {
    if constexpr (std::is_same_v<Result, float>) {
      product.multiply(task, packed.data(), scratch.data(), {c.data(), stride}, before != 0, nullptr);
    } else {
      product.multiply(task, packed.data(), scratch.data(), {c.data(), stride}, nullptr);
    }
  }
  return c;
}

struct Sizes {
  int64_t m, k, n;
};
constexpr Sizes kSizes[] = {{1, 1, 1},    {1, 7, 16},    {4, 2, 33},   {5, 64, 17},   {11, 63, 31},
                            {12, 65, 32}, {13, 128, 48}, {23, 31, 65}, {100, 9, 300}, {37, 1400, 40}};

template <class Element>
void expect_exact_products() {
  std::mt19937_64 random(test_seed(3));
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    for (const auto& [m, k, n] : kSizes) {
      for (const int layout : {0, 1, 2, 3}) {
        SCOPED_TRACE(::testing::Message() << "instruction set " << static_cast<int>(isa) << ", " << m << " "
                                          << k << " " << n << ", " << layout);
        const Matrix<Element> a(m, k, layout % 2 == 1, random), b(k, n, layout / 2 == 1, random);
        for (const float before : {0.0f, 3.0f}) {
          const std::vector<float> c = multiplied<Element>(a, b, isa, 2, n + 5, before);
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n + 5; ++j) {
              if (j >= n) {
                ASSERT_EQ(c[i * (n + 5) + j], kUntouched);
                continue;
              }
              double exact = before, magnitude = before;
              for (int64_t w = 0; w < k; ++w) {
                exact += a.at(i, w) * b.at(w, j);
                magnitude += std::abs(a.at(i, w) * b.at(w, j));
              }
              ASSERT_NEAR(c[i * (n + 5) + j], exact, 1e-6 * magnitude) << i << ", " << j;
            }
          }
        }
      }
    }
  }
}

TEST(PanelMath, MultipliesFloat32OfAnyLayoutAndSize) {
  expect_exact_products<float>();
}

TEST(PanelMath, MultipliesBfloat16OfAnyLayoutAndSize) {
  expect_exact_products<BFloat16>();
}

TEST(PanelMath, RoundsBfloat16ResultsOnce) {
  std::mt19937_64 random(test_seed(4));
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    const Matrix<BFloat16> a(29, 301, false, random), b(301, 270, false, random);
    const std::vector<float> sums = multiplied<BFloat16>(a, b, isa, 1, 270, 0);
    const auto c = multiplied<BFloat16, BFloat16>(a, b, isa, 3, 270, 0);
    for (size_t i = 0; i < sums.size(); ++i) {
      ASSERT_NEAR(value_of(c[i]), sums[i], std::abs(sums[i]) * 0x1p-8) << i;
    }
  }
}

// However the product is cut, and whatever else is computed with it.
template <class Element>
void expect_same_bits_everywhere() {
  std::mt19937_64 random(test_seed(5));
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    const Matrix<Element> a(150, 1500, false, random), b(1500, 210, false, random);
    const std::vector<float> whole = multiplied<Element>(a, b, isa, 1, 210, 0);
    for (const int64_t threads : {2, 7}) EXPECT_EQ(multiplied<Element>(a, b, isa, threads, 210, 0), whole);
    for (const int64_t rows : {1, 5, 9, 13}) {
      Matrix<Element> first = a;
      first.rows = rows;
      const std::vector<float> part = multiplied<Element>(first, b, isa, 1, 210, 0);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin())) << rows << " rows";
    }
    for (const int64_t columns : {1, 16, 17, 40}) {
      Matrix<Element> first(1500, columns, false, random);
      for (int64_t r = 0; r < 1500; ++r) {
        for (int64_t j = 0; j < columns; ++j) first.data[r * first.stride() + j] = b.data[r * b.stride() + j];
      }
      const std::vector<float> part = multiplied<Element>(a, first, isa, 1, columns, 0);
      for (int64_t i = 0; i < 150; ++i) {
        for (int64_t j = 0; j < columns; ++j) ASSERT_EQ(part[i * columns + j], whole[i * 210 + j]);
      }
    }
  }
}

TEST(PanelMath, GivesEveryResultTheSameBitsWhereverItStands) {
  expect_same_bits_everywhere<float>();
  expect_same_bits_everywhere<BFloat16>();
}

// To nearest, ties to even; infinities stay, and what is no number stays none.
TEST(PanelMath, RoundsFloatsToPairs) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values{1, 1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1.1p-8f, -2.71828f,
                                  0, kInfinity,   -kInfinity,  kNan};
  const auto count = static_cast<int64_t>(values.size());
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    for (const bool adjacent : {true, false}) {  // along the sum, or along the panel
      for (const int64_t width : {kLeftPanel, kRightPanel}) {
        std::vector<BFloat16Pair> words(5 * kRightPanel);
        const Vectors<float> vectors = adjacent ? Vectors<float>{values.data(), count, 1, 1, count}
                                                : Vectors<float>{values.data(), 1, count, count, 1};
        panel_math<BFloat16Pair>(isa).pack(vectors, width, words.data());
        for (int64_t i = 0; i < count; ++i) {
          const uint32_t word = words[adjacent ? i / 2 * width : i].bits;
          const float rounded =
              std::bit_cast<float>(adjacent && i % 2 == 1 ? word & 0xffff0000u : word << 16);
          if (std::isnan(values[i])) {
            EXPECT_TRUE(std::isnan(rounded));
            continue;
          }
          const float expected[] = {1, 1, 1 + 0x4p-8f, 1 + 0x2p-8f, -2.71875f, 0, kInfinity, -kInfinity};
          EXPECT_EQ(rounded, expected[i]) << values[i];
        }
      }
    }
  }
}

}  // namespace
}  // namespace espalier::testing
