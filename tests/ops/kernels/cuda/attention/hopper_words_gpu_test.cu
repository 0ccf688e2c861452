// SPDX-License-Identifier: Apache-2.0
// The words of simt_hopper.h on a GPU, by the kernels that simt_hopper_test.cpp runs in the emulator: where
// an attention kernel is wrong, what it is made of is looked at here first.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/ops/kernels/cuda/attention/gpu_array.cuh"
#include "tests/ops/kernels/cuda/attention/hopper_word_kernels.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

using cuda::check;

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    word_kernel(const __grid_constant__ typename Kernel::Params params) {
  Kernel::run(params);
}

template <class Kernel>
void run(const typename Kernel::Params& params, int shared_bytes) {
  void (*kernel)(typename Kernel::Params) = &word_kernel<Kernel>;
  cuda::launch("word_kernel", kernel, {{1, 1, 1}, Kernel::kThreads, shared_bytes, nullptr}, params);
  check(cudaDeviceSynchronize(), "word_kernel");
}

class HopperWordsCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper_gpu()) GTEST_SKIP() << "no Hopper GPU is visible";
  }
};

// Small integers: every type and every order of summation is exact.
template <class Element>
std::vector<Element> small_integers(uint64_t seed, size_t size) {
  std::mt19937_64 random(test_seed(seed));
  std::vector<Element> result;
  for (size_t i = 0; i < size; ++i) {
    const auto value = static_cast<float>(static_cast<int>(random() % 9) - 4);
    const uint16_t sign = value < 0 ? 0x8000 : 0;
    uint16_t bits = 0;
    if (value != 0) {
      int exponent = 0;
      const float fraction = std::frexp(std::fabs(value), &exponent) * 2 - 1;
      constexpr bool kBFloat16 = std::is_same_v<Element, BFloat16>;
      constexpr int kBits = kBFloat16 ? 7 : 10, kBias = kBFloat16 ? 127 : 15;
      bits = static_cast<uint16_t>((exponent - 1 + kBias) << kBits |
                                   static_cast<int>(std::ldexp(fraction, kBits)));
    }
    result.push_back({static_cast<uint16_t>(sign | bits)});
  }
  return result;
}

template <class Element>
float value_of(Element element) {
  constexpr bool kBFloat16 = std::is_same_v<Element, BFloat16>;
  constexpr int kBits = kBFloat16 ? 7 : 10, kBias = kBFloat16 ? 127 : 15;
  const int exponent = (element.bits & 0x7fff) >> kBits, fraction = element.bits & ((1 << kBits) - 1);
  if (exponent == 0) return 0;
  const float size = std::ldexp(static_cast<float>(fraction + (1 << kBits)), exponent - kBias - kBits);
  return element.bits >> 15 ? -size : size;
}

simt::TensorMap map_rows(const void* data, int rows, int columns) {
  return simt::make_map({data, columns, columns, columns, 1, rows, 1, rows});
}

template <class Kernel>
void expect_product(const char* what) {
  using Element = typename Kernel::Element;
  constexpr int kN = Kernel::kColumns;
  const auto a = small_integers<Element>(1, size_t{128} * Kernel::kSummed);
  const auto b = small_integers<Element>(2, size_t{kN} * Kernel::kSummed);
  const Array<Element> gpu_a(a), gpu_b(b);
  const Array<float> gpu_d(std::vector<float>(size_t{128} * kN, NAN));
  run<Kernel>({map_rows(gpu_a.data(), Kernel::kRowsA, Kernel::kColumnsA),
               map_rows(gpu_b.data(), Kernel::kRowsB, Kernel::kColumnsB), gpu_a.data(), gpu_d.data()},
              Kernel::kSharedBytes);
  const std::vector<float> d = gpu_d.values();
  int wrong = 0;
  for (int m = 0; m < 128; ++m) {
    for (int n = 0; n < kN; ++n) {
      float expected = 0;
      for (int k = 0; k < Kernel::kSummed; ++k) {
        expected +=
            value_of(Kernel::kOrderA == Order::kSummed ? a[m * Kernel::kSummed + k] : a[k * 128 + m]) *
            value_of(Kernel::kOrderB == Order::kSummed ? b[n * Kernel::kSummed + k] : b[k * kN + n]);
      }
      wrong += d[m * kN + n] != expected;
    }
  }
  EXPECT_EQ(wrong, 0) << what << ", of " << 128 * kN;
}

TEST_F(HopperWordsCuda, MultipliesOperandsOfEitherOrder) {
  constexpr Order kSummed = Order::kSummed, kKept = Order::kKept;
  expect_product<ProductKernel<BFloat16, 64, kSummed, kSummed, false>>("64, summed, summed");
  expect_product<ProductKernel<BFloat16, 128, kSummed, kSummed, false>>("128, summed, summed");
  expect_product<ProductKernel<BFloat16, 64, kSummed, kKept, false>>("64, summed, kept");
  expect_product<ProductKernel<BFloat16, 128, kSummed, kKept, false>>("128, summed, kept");
  expect_product<ProductKernel<BFloat16, 128, kKept, kSummed, false>>("128, kept, summed");
  expect_product<ProductKernel<BFloat16, 64, kKept, kKept, false>>("64, kept, kept");
  expect_product<ProductKernel<BFloat16, 128, kKept, kKept, false>>("128, kept, kept");
  expect_product<ProductKernel<Float16, 128, kSummed, kKept, false>>("float16");
}

TEST_F(HopperWordsCuda, MultipliesRegisters) {
  expect_product<ProductKernel<BFloat16, 64, Order::kSummed, Order::kKept, true>>("64, kept");
  expect_product<ProductKernel<BFloat16, 128, Order::kSummed, Order::kKept, true>>("128, kept");
  expect_product<ProductKernel<Float16, 128, Order::kSummed, Order::kSummed, true>>("128, summed");
}

TEST_F(HopperWordsCuda, BoxesAreZeroOutsideTheTensorAndGoTokenByToken) {
  constexpr int kTokens = 30, kHeads = 4, kColumns = 96;
  const auto elements = small_integers<BFloat16>(3, size_t{kTokens} * kHeads * kColumns);
  const Array<BFloat16> tensor(elements);
  const simt::TensorMap map =
      simt::make_map({tensor.data(), kHeads * kColumns, kColumns, kColumns, kHeads, kTokens, 2, 8});
  for (const auto& [column, head, token] :
       {std::array{0, 0, 0}, std::array{64, 2, 26}, std::array{0, 3, -3}, std::array{0, 0, 30}}) {
    const Array<uint16_t> out(std::vector<uint16_t>(size_t{16} * 64, 0x7fff));
    run<BoxKernel>({map, column, head, token, 16, out.data()}, BoxKernel::shared_bytes(16));
    const std::vector<uint16_t> box = out.values();
    for (int i = 0; i < 16 * 64; ++i) {
      const int t = token + i / 128, h = head + i / 64 % 2, c = column + i % 64;
      const bool inside = 0 <= t && t < kTokens && h < kHeads && c < kColumns;
      ASSERT_EQ(box[i], inside ? elements[(t * kHeads + h) * kColumns + c].bits : 0) << token << ", " << i;
    }
  }
}

TEST_F(HopperWordsCuda, StoresBoxesAsFarAsTheyAreInTheTensor) {
  constexpr int kTokens = 6, kHeads = 4, kColumns = 96, kRows = 16;
  for (const auto& [column, head, token] :
       {std::array{0, 0, 0}, std::array{64, 2, 1}, std::array{0, 3, -3}, std::array{0, 0, 6}}) {
    const Array<uint16_t> tensor(std::vector<uint16_t>(size_t{kTokens} * kHeads * kColumns, 0x7fff));
    const simt::TensorMap map =
        simt::make_map({tensor.data(), kHeads * kColumns, kColumns, kColumns, kHeads, kTokens, 2, 8});
    run<StoreKernel>({map, column, head, token, kRows, true, true}, StoreKernel::shared_bytes(kRows));
    const std::vector<uint16_t> got = tensor.values();
    for (int i = 0; i < kTokens * kHeads * kColumns; ++i) {
      const int t = i / (kHeads * kColumns) - token, h = i / kColumns % kHeads - head,
                c = i % kColumns - column;
      const bool inside = 0 <= t && t < 8 && 0 <= h && h < 2 && 0 <= c && c < 64;
      ASSERT_EQ(got[i], inside ? 64 * (2 * t + h) + c : 0x7fff) << token << ", " << i;
    }
  }
}

TEST_F(HopperWordsCuda, ReadsWhatThreadsWrote) {
  const Array<float> gpu_d(std::vector<float>(64 * 64, NAN));
  run<WrittenTileKernel>({true, gpu_d.data()}, WrittenTileKernel::kSharedBytes);
  const std::vector<float> d = gpu_d.values();
  for (int i = 0; i < 64 * 64; ++i) ASSERT_EQ(d[i], WrittenTileKernel::expected(i / 64, i % 64)) << i;
}

TEST_F(HopperWordsCuda, AddsToGlobalMemory) {
  const Array<float> from(std::vector<float>(256, 3)), sums(std::vector<float>(256, 10));
  run<AddKernel>({from.data(), true, true, sums.data()}, AddKernel::kSharedBytes);
  const std::vector<float> got = sums.values();
  for (int i = 0; i < 256; ++i) ASSERT_EQ(got[i], static_cast<float>(17 + 2 * i)) << i;
}

TEST_F(HopperWordsCuda, AddsVectorsToGlobalMemory) {
  const Array<float> sums(std::vector<float>(256, 10));
  run<AddVectorKernel>({sums.data()}, 0);
  const std::vector<float> got = sums.values();
  for (int i = 0; i < 256; ++i) ASSERT_EQ(got[i], AddVectorKernel::expected(i, 10)) << i;
}

}  // namespace
}  // namespace espalier::testing
