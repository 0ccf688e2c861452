// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "espalier/ops/kernels/cuda/attention/simt_hopper.h"
#include "tests/ops/kernels/cuda/attention/hopper_word_kernels.h"
#include "tests/ops/kernels/cuda/emulator.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using namespace testing;

template <class Element>
struct Matrix {
  int rows, columns;
  std::vector<Element> elements;

  float at(int row, int column) const {
    return simt::emulator::to_float(elements[static_cast<size_t>(row) * columns + column]);
  }
  simt::TensorMap map(int box_rows) const {
    return {.data = reinterpret_cast<const std::byte*>(elements.data()),
            .size = {columns, 1, rows},
            .stride_bytes = {2, 2L * columns, 2L * columns},
            .box_heads = 1,
            .box_tokens = box_rows};
  }
};

template <class Element>
Matrix<Element> random_matrix(uint64_t seed, int rows, int columns) {
  std::mt19937_64 random(testing::test_seed(seed));
  std::normal_distribution<float> normal;
  Matrix<Element> matrix{rows, columns, {}};
  for (int i = 0; i < rows * columns; ++i)
    matrix.elements.push_back({simt::emulator::round_to_bits(normal(random), Element{})});
  return matrix;
}

template <class Kernel>
void expect_product() {
  using Element = typename Kernel::Element;
  constexpr int kN = Kernel::kColumns;
  const auto a = random_matrix<Element>(1, Kernel::kRowsA, Kernel::kColumnsA);
  const auto b = random_matrix<Element>(2, Kernel::kRowsB, Kernel::kColumnsB);
  std::vector<float> d(static_cast<size_t>(128) * kN, NAN);
  const typename Kernel::Params params{a.map(Kernel::kRowsA), b.map(Kernel::kRowsB), a.elements.data(),
                                       d.data()};
  emulate({.threads = Kernel::kThreads, .shared_bytes = Kernel::kSharedBytes, .seed = 3},
          [&] { Kernel::run(params); });
  for (int m = 0; m < 128; ++m) {
    for (int n = 0; n < kN; ++n) {
      double expected = 0;
      for (int k = 0; k < Kernel::kSummed; ++k) {
        expected += double{Kernel::kOrderA == Order::kSummed ? a.at(m, k) : a.at(k, m)} *
                    (Kernel::kOrderB == Order::kSummed ? b.at(n, k) : b.at(k, n));
      }
      ASSERT_NEAR(d[m * kN + n], expected, 1e-4) << m << ", " << n;
    }
  }
}

template <class Element>
class SimtHopperElementTest : public ::testing::Test {};
using Elements = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(SimtHopperElementTest, Elements);

TYPED_TEST(SimtHopperElementTest, MultipliesOperandsOfEitherOrder) {
  constexpr Order kSummed = Order::kSummed, kKept = Order::kKept;
  expect_product<ProductKernel<TypeParam, 64, kSummed, kSummed, false>>();
  expect_product<ProductKernel<TypeParam, 128, kSummed, kSummed, false>>();
  expect_product<ProductKernel<TypeParam, 64, kSummed, kKept, false>>();
  expect_product<ProductKernel<TypeParam, 128, kSummed, kKept, false>>();
  expect_product<ProductKernel<TypeParam, 128, kKept, kSummed, false>>();
  expect_product<ProductKernel<TypeParam, 64, kKept, kKept, false>>();
  expect_product<ProductKernel<TypeParam, 128, kKept, kKept, false>>();
}

TYPED_TEST(SimtHopperElementTest, MultipliesRegisters) {
  expect_product<ProductKernel<TypeParam, 64, Order::kSummed, Order::kKept, true>>();
  expect_product<ProductKernel<TypeParam, 128, Order::kSummed, Order::kSummed, true>>();
}

TEST(SimtHopperTest, DescriptorIsThatOfThePtxManual) {
  // Start 0x8400, from slab to slab 0x2000, from 8 rows to the next 0x400, 128-byte swizzle.
  EXPECT_EQ(simt::slab_descriptor(0x8400, 0x2000), 0x4000004002000840u);
}

/// A product's operand and its descriptor by cute::SM90::GMMA::make_gmma_desc of CUTLASS 4.2.0: of tensors in
/// shared memory that begins at 1,024, laid out by tile_to_shape of Layout_K_SW128_Atom (rows, columns), or
/// of Layout_MN_SW128_Atom (columns, rows) with Step<_2, _1>.
struct DescribedOperand {
  int rows;  // of the slabs
  Order order;
  int kept;  // rows or columns of the operand that are not summed over
  int row, column;
  uint64_t descriptor;
};
constexpr DescribedOperand kDescribedByCute[] = {
    {128, Order::kSummed, 64, 0, 0, 0x4000004000010040},
    {128, Order::kSummed, 64, 0, 16, 0x4000004000010042},
    {128, Order::kSummed, 64, 0, 48, 0x4000004000010046},
    {128, Order::kSummed, 64, 0, 64, 0x4000004000010440},
    {128, Order::kSummed, 64, 64, 32, 0x4000004000010244},
    {128, Order::kSummed, 64, 64, 112, 0x4000004000010646},
    {128, Order::kSummed, 64, 64, 240, 0x4000004000010e46},
    {128, Order::kSummed, 128, 0, 48, 0x4000004000010046},
    {64, Order::kSummed, 64, 0, 240, 0x4000004000010646},
    {48, Order::kSummed, 48, 0, 32, 0x4000004000010044},
    {128, Order::kKept, 128, 0, 0, 0x4000004004000040},
    {128, Order::kKept, 128, 16, 0, 0x40000040040000c0},
    {128, Order::kKept, 128, 112, 0, 0x40000040040003c0},
    {128, Order::kKept, 128, 112, 128, 0x4000004004000bc0},
    {64, Order::kKept, 128, 0, 0, 0x4000004002000040},
    {64, Order::kKept, 128, 48, 128, 0x40000040020005c0},
    {48, Order::kKept, 128, 32, 0, 0x4000004001800140},
    {128, Order::kKept, 64, 16, 0, 0x40000040000000c0},
    {128, Order::kKept, 64, 0, 64, 0x4000004000000440},
    {128, Order::kKept, 64, 112, 64, 0x40000040000007c0},
    {64, Order::kKept, 64, 48, 0, 0x40000040000001c0},
};

template <int kRows>
uint64_t descriptor_of(const DescribedOperand& operand) {
  const simt::Slabs<kRows> slabs(simt::shared());
  return operand.order == Order::kSummed ? slabs.summed_columns(operand.row, operand.column)
                                         : slabs.summed_rows(operand.row, operand.column);
}

TEST(SimtHopperTest, DescriptorsAreThoseOfCute) {
  // From slab to slab: nothing where an operand is within one slab. There CuTe has 0.
  constexpr uint64_t kLeadingOffset = uint64_t{0x3fff} << 16;
  emulate({.shared_bytes = 128 * 256 * 2}, [&] {
    if (simt::thread() != 0) return;
    for (const DescribedOperand& operand : kDescribedByCute) {
      const uint64_t descriptor = operand.rows == 128  ? descriptor_of<128>(operand)
                                  : operand.rows == 64 ? descriptor_of<64>(operand)
                                                       : descriptor_of<48>(operand);
      const bool one_slab = operand.order == Order::kKept && operand.kept == simt::kSlabColumns;
      EXPECT_EQ(one_slab ? descriptor & ~kLeadingOffset : descriptor, operand.descriptor)
          << "rows " << operand.rows << ", row " << operand.row << ", column " << operand.column << ", kept "
          << operand.kept;
    }
  });
}

std::vector<float> load_one_box(const simt::TensorMap& map, int column, int head, int token) {
  const int rows = map.box_heads * map.box_tokens;
  std::vector<uint16_t> bits(static_cast<size_t>(rows) * 64);
  emulate({.shared_bytes = BoxKernel::shared_bytes(rows), .seed = 5},
          [&] { BoxKernel::run({map, column, head, token, rows, bits.data()}); });
  std::vector<float> box;
  for (const uint16_t element : bits) box.push_back(simt::emulator::to_float(BFloat16{element}));
  return box;
}

TEST(SimtHopperTest, BoxesAreZeroOutsideTheTensor) {
  const auto matrix = random_matrix<BFloat16>(4, 30, 96);
  for (const auto [token, column, head] : {std::array{0, 0, 0}, std::array{20, 64, 0}, std::array{-3, 64, 0},
                                           std::array{30, 0, 0}, std::array{0, 0, 1}}) {
    const std::vector<float> box = load_one_box(matrix.map(16), column, head, token);
    for (int r = 0; r < 16; ++r) {
      for (int c = 0; c < 64; ++c) {
        const bool inside = head == 0 && 0 <= token + r && token + r < 30 && column + c < 96;
        EXPECT_EQ(box[r * 64 + c], inside ? matrix.at(token + r, column + c) : 0.0F) << token << ", " << r;
      }
    }
  }
}

TEST(SimtHopperTest, BoxesOfHeadsGoTokenByToken) {
  const auto matrix = random_matrix<BFloat16>(4, 6 * 4, 64);  // of 6 tokens with 4 heads
  simt::TensorMap map = matrix.map(4);
  map.size[1] = 4;
  map.size[2] = 6;
  map.stride_bytes[2] = 4L * 128;
  map.box_heads = 2;
  const std::vector<float> box = load_one_box(map, 0, 2, 3);
  for (int r = 0; r < 8; ++r) {
    const int token = 3 + r / 2, head = 2 + r % 2;
    EXPECT_EQ(box[r * 64], token < 6 ? matrix.at(token * 4 + head, 0) : 0.0F) << r;
  }
}

/// What a thread of the ring below may get wrong.
enum class Mistake {
  kNone,
  kNoWaitForFull,   // the consumer reads what may not be there
  kNoWaitForEmpty,  // the producer overwrites what may still be read
  kEarlyRelease,    // the consumer gives a stage back before its product is done
  kNoProductFence,
  kTooFewBytes,  // the barrier expects fewer bytes than come
  kTooManyBytes,
  kNoBarrierFence,
  kWrongParity,
  kTouchesSums,  // while products are under way
};

/// Sums over tiles of 64 rows: D [64, 64] = sum_t A_t^T A_t, with A_t through a ring of two stages.
float ring(Mistake mistake, uint64_t seed) {
  constexpr int kTiles = 7, kStages = 2, kBytes = 64 * 128;
  const auto matrix = random_matrix<BFloat16>(6, 64 * kTiles, 64);
  const simt::TensorMap map = matrix.map(64);
  std::vector<float> d(64 * 64, NAN);
  emulate({.threads = 160, .shared_bytes = kStages * kBytes + 32, .seed = seed}, [&] {
    std::byte* shared = simt::shared();
    auto* full = reinterpret_cast<uint64_t*>(shared + kStages * kBytes);
    uint64_t* empty = full + kStages;
    if (simt::thread() == 0) {
      for (int s = 0; s < kStages; ++s) {
        simt::init_barrier(full + s, 1);
        simt::init_barrier(empty + s, 4);
      }
      if (mistake != Mistake::kNoBarrierFence) simt::fence_barriers();
    }
    simt::sync_block();
    if (simt::warp() == 4) {
      if (simt::lane() != 0) return;
      for (int t = 0; t < kTiles; ++t) {
        const int stage = t % kStages, round = t / kStages;
        if (mistake != Mistake::kNoWaitForEmpty) simt::wait_phase(empty + stage, round % 2 ^ 1);
        const int wrong = mistake == Mistake::kTooFewBytes ? -16 : mistake == Mistake::kTooManyBytes ? 16 : 0;
        simt::arrive_expecting(full + stage, kBytes + wrong);
        simt::load_box(shared + stage * kBytes, &map, full + stage, 0, 0, 64 * t);
      }
      return;
    }
    float sums[32] = {};
    for (int t = 0; t < kTiles; ++t) {
      const int stage = t % kStages, round = t / kStages;
      const int parity = mistake == Mistake::kWrongParity ? round % 2 ^ 1 : round % 2;
      if (mistake != Mistake::kNoWaitForFull) simt::wait_phase(full + stage, parity);
      const simt::Slabs<64> tile(shared + stage * kBytes);
      if (mistake != Mistake::kNoProductFence || t == 0) simt::fence_products();
      for (int k = 0; k < 64; k += 16) {
        simt::multiply_async<BFloat16, 64, Order::kKept, Order::kKept>(sums, tile.summed_rows(k, 0),
                                                                       tile.summed_rows(k, 0), true);
      }
      simt::commit_products();
      if (mistake == Mistake::kTouchesSums) sums[5] += 1;
      if (mistake == Mistake::kEarlyRelease && simt::lane() == 0) simt::arrive(empty + stage);
      if (mistake == Mistake::kEarlyRelease) simt::sync_threads(1, 128);
      simt::wait_products<0>();
      if (mistake != Mistake::kEarlyRelease && simt::lane() == 0) simt::arrive(empty + stage);
    }
    for (int i = 0; i < 32; ++i) {
      const int row = 16 * simt::warp() + simt::lane() / 4 + 8 * (i / 2 % 2);
      d[row * 64 + 8 * (i / 4) + 2 * (simt::lane() % 4) + i % 2] = sums[i];
    }
  });
  float worst = 0;
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < 64; ++n) {
      float expected = 0;
      for (int k = 0; k < matrix.rows; ++k) expected += matrix.at(k, m) * matrix.at(k, n);
      const float error = std::fabs(d[m * 64 + n] - expected);
      worst = error <= worst ? worst : error;  // NaN stays
    }
  }
  return worst;
}

TEST(SimtHopperTest, RingDelivers) {
  for (uint64_t seed = 0; seed < 10; ++seed) EXPECT_LT(ring(Mistake::kNone, seed), 1e-3) << "seed " << seed;
}

TEST(SimtHopperTest, MistakesShow) {
  for (const Mistake mistake : {Mistake::kNoWaitForFull, Mistake::kNoWaitForEmpty, Mistake::kEarlyRelease,
                                Mistake::kNoProductFence, Mistake::kTooFewBytes, Mistake::kTooManyBytes,
                                Mistake::kNoBarrierFence, Mistake::kWrongParity, Mistake::kTouchesSums}) {
    int shown = 0;
    for (uint64_t seed = 0; seed < 10; ++seed) {
      try {
        shown += !(ring(mistake, seed) < 1e-3);
      } catch (const std::logic_error&) {
        ++shown;
      }
    }
    EXPECT_GE(shown, 3) << "mistake " << static_cast<int>(mistake);
  }
}

TEST(SimtHopperTest, WrittenTilesNeedAFence) {
  std::vector<float> d(64 * 64, NAN);
  const auto run = [&](bool fence) {
    emulate(
        {.threads = WrittenTileKernel::kThreads, .shared_bytes = WrittenTileKernel::kSharedBytes, .seed = 7},
        [&] { WrittenTileKernel::run({fence, d.data()}); });
  };
  run(true);
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < 64; ++n)
      EXPECT_EQ(d[m * 64 + n], WrittenTileKernel::expected(m, n)) << m << ", " << n;
  }
  EXPECT_THROW(run(false), std::logic_error);
}

TEST(SimtHopperTest, AddsToGlobalMemory) {
  struct alignas(16) Floats {
    float values[256];
  } from, sums;
  const auto run = [&](bool fence, bool wait) {
    std::fill_n(from.values, 256, 3.0F);
    std::fill_n(sums.values, 256, 10.0F);
    emulate({.threads = AddKernel::kThreads, .shared_bytes = AddKernel::kSharedBytes, .seed = 8},
            [&] { AddKernel::run({from.values, fence, wait, sums.values}); });
  };
  run(true, true);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(sums.values[i], static_cast<float>(17 + 2 * i));
  EXPECT_THROW(run(false, true), std::logic_error);
  EXPECT_THROW(run(true, false), std::logic_error);
}

TEST(SimtHopperTest, StoresBoxesAsFarAsTheyAreInTheTensor) {
  constexpr int kTokens = 6, kHeads = 4, kColumns = 96, kRows = 16;
  struct alignas(16) Tensor {
    uint16_t bits[kTokens * kHeads * kColumns];
  } tensor;
  const simt::TensorMap map =
      simt::make_map({tensor.bits, kHeads * kColumns, kColumns, kColumns, kHeads, kTokens, 2, 8});
  const auto run = [&](const std::array<int, 3>& at, bool fence, bool wait) {
    std::fill_n(tensor.bits, std::size(tensor.bits), 0x7fff);
    emulate({.threads = StoreKernel::kThreads, .shared_bytes = StoreKernel::shared_bytes(kRows), .seed = 3},
            [&] { StoreKernel::run({map, at[0], at[1], at[2], kRows, fence, wait}); });
  };
  for (const std::array<int, 3>& at :
       {std::array{0, 0, 0}, std::array{64, 2, 1}, std::array{0, 3, -3}, std::array{0, 0, 6}}) {
    run(at, true, true);
    for (int t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        for (int c = 0; c < kColumns; ++c) {
          const int token = t - at[2], head = h - at[1], column = c - at[0];
          const bool inside = 0 <= token && token < 8 && 0 <= head && head < 2 && 0 <= column && column < 64;
          ASSERT_EQ(tensor.bits[(t * kHeads + h) * kColumns + c],
                    inside ? 64 * (2 * token + head) + column : 0x7fff);
        }
      }
    }
  }
  EXPECT_THROW(run({0, 0, 0}, false, true), std::logic_error);
  EXPECT_THROW(run({0, 0, 0}, true, false), std::logic_error);
}

TEST(SimtHopperTest, AddsVectorsToGlobalMemory) {
  struct alignas(16) Floats {
    float values[260];
  } sums;
  std::fill_n(sums.values, 260, 10.0F);
  emulate({.threads = AddVectorKernel::kThreads, .seed = 8}, [&] { AddVectorKernel::run({sums.values}); });
  for (int i = 0; i < 256; ++i) EXPECT_EQ(sums.values[i], AddVectorKernel::expected(i, 10));
  EXPECT_THROW(emulate({}, [&] { AddVectorKernel::run({sums.values + 1}); }), std::logic_error);
}

TEST(SimtHopperTest, RefusesWhatHangsOrIsUndefined) {
  const auto with_barrier = [](auto&& body) {
    emulate({.shared_bytes = 1088}, [&] {
      if (simt::thread() != 0) return;
      auto* barrier = reinterpret_cast<uint64_t*>(simt::shared() + 1024);
      simt::init_barrier(barrier, 1);
      simt::fence_barriers();
      body(barrier);
    });
  };
  EXPECT_NO_THROW(with_barrier([](uint64_t* b) { simt::wait_phase(b, 1); }));
  EXPECT_THROW(with_barrier([](uint64_t* b) { simt::wait_phase(b, 0); }), std::logic_error);
  EXPECT_THROW(with_barrier([](uint64_t* b) { simt::wait_phase(b + 1, 1); }), std::logic_error);
  alignas(16) const float source[4] = {};
  EXPECT_THROW(with_barrier([&](uint64_t* b) {
                 simt::arrive_expecting(b, 16);
                 simt::load_bytes(simt::shared(), source, 16, b);  // and ends
               }),
               std::logic_error);
  EXPECT_THROW(with_barrier([&](uint64_t* b) { simt::load_bytes(simt::shared() + 8, source, 16, b); }),
               std::logic_error);
  EXPECT_THROW(with_barrier([&](uint64_t* b) {
                 simt::load_bytes(simt::shared(), source, 16, b);
                 simt::load_bytes(simt::shared(), source, 16, b);
               }),
               std::logic_error);
}

}  // namespace
}  // namespace espalier
