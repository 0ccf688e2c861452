// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/ops/kernels/cuda/emulator.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::emulate;
using testing::EmulatedCounts;
using testing::EmulatedLaunch;
using testing::test_seed;

template <class Element>
std::vector<Element> random_elements(std::mt19937_64& random, size_t size) {
  std::normal_distribution<float> normal;
  std::vector<Element> elements;
  for (size_t i = 0; i < size; ++i) {
    elements.push_back({simt::emulator::round_to_bits(normal(random), Element{})});
  }
  return elements;
}

TEST(SimtTest, RoundsToNearestEven) {
  using simt::emulator::round_to_bits;
  using simt::emulator::to_float;
  EXPECT_EQ(round_to_bits(1.00390625F, BFloat16{}), 0x3f80);  // a tie, to even
  EXPECT_EQ(round_to_bits(1.01171875F, BFloat16{}), 0x3f82);
  EXPECT_EQ(round_to_bits(1.00048828125F, Float16{}), 0x3c00);
  EXPECT_EQ(round_to_bits(65519.0F, Float16{}), 0x7bff);
  EXPECT_EQ(round_to_bits(65520.0F, Float16{}), 0x7c00);
  EXPECT_EQ(round_to_bits(-std::ldexp(1.0F, -24), Float16{}), 0x8001);
  EXPECT_EQ(round_to_bits(2047.9999F, Float16{}), 0x6800);  // carries into the exponent
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const Float16 element{static_cast<uint16_t>(bits)};
    EXPECT_EQ(round_to_bits(to_float(element), Float16{}), bits);
  }
}

/// C [16, 8] = A [16, 16] B [16, 8] by one warp: A row by row in shared memory, B too (so read transposed).
template <class Element>
ESPALIER_KERNEL void multiply_tile(const Element* a, const Element* b, float* c) {
  auto* tile = reinterpret_cast<Element*>(simt::shared());
  const int lane = simt::lane();
  simt::copy_async(tile + 8 * lane, a + 8 * lane, true);
  simt::copy_async(tile + 256 + 8 * lane, b + 8 * (lane % 16), lane < 16);
  simt::commit_copies();
  simt::wait_copies<0>();
  simt::sync_block();
  uint32_t ra[4], rb[4];
  simt::load_matrices(ra, tile + lane % 16 * 16 + lane / 16 * 8);
  simt::load_matrices_transposed(rb, tile + 256 + lane % 16 * 8);
  float d[4] = {};
  simt::multiply_add<Element>(d, ra, {rb[0], rb[1]});
  for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

template <class Element>
class SimtElementTest : public ::testing::Test {};
using Elements = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(SimtElementTest, Elements);

TYPED_TEST(SimtElementTest, MultipliesTiles) {
  std::mt19937_64 random(test_seed(1));
  const auto a = random_elements<TypeParam>(random, 256), b = random_elements<TypeParam>(random, 128);
  std::vector<float> c(128, NAN);
  const EmulatedCounts counts =
      emulate({.shared_bytes = 1024, .seed = 2}, [&] { multiply_tile(a.data(), b.data(), c.data()); });
  using simt::emulator::to_float;
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float expected = 0;
      for (int k = 0; k < 16; ++k) expected += to_float(a[m * 16 + k]) * to_float(b[k * 8 + n]);
      EXPECT_FLOAT_EQ(c[m * 8 + n], expected) << m << ", " << n;
    }
  }
  EXPECT_EQ(counts.products, 1);
  EXPECT_EQ(counts.matrix_reads, 8);
  EXPECT_EQ(counts.matrix_accesses, 4 * 2 + 4 * 1) << "rows of 32 bytes fall on the same banks in pairs";
}

TEST(SimtTest, LanesExchange) {
  std::vector<int> by(64), all(64);
  emulate({.threads = 64, .seed = 3}, [&] {
    const int t = simt::thread();
    by[t] = simt::shuffle_xor(t, 5);
    all[t] = static_cast<int>(simt::ballot(t % 32 < 3));
  });
  for (int t = 0; t < 64; ++t) {
    EXPECT_EQ(by[t], t ^ 5);
    EXPECT_EQ(all[t], 7);
  }
}

TEST(SimtTest, FindsBits) {
  EXPECT_EQ(simt::lowest_bit(1), 0);
  EXPECT_EQ(simt::lowest_bit(0x80000000u), 31);
  EXPECT_EQ(simt::lowest_bit(0b101000), 3);
}

TEST(SimtTest, LanesExchangeEightBytes) {
  std::vector<double> by(32);
  emulate({.seed = 5}, [&] { by[simt::lane()] = simt::shuffle_xor(simt::lane() + 0x1p-40, 3); });
  for (int t = 0; t < 32; ++t) EXPECT_EQ(by[t], (t ^ 3) + 0x1p-40);
}

TEST(SimtTest, VectorsAreSixteenBytes) {
  alignas(16) const float from[4] = {1, 2, 3, 4};
  simt::Vector16 vector{};
  emulate({}, [&] {
    if (simt::thread() == 0) vector = simt::load_vector(from);
  });
  EXPECT_EQ(std::memcmp(&vector, from, sizeof(from)), 0);
}

/// Every thread writes a number and reads its neighbour's; `forget` leaves out what orders the two.
int wrong_neighbours(bool forget, uint64_t seed) {
  int wrong = 0;
  emulate({.threads = 128, .shared_bytes = 512, .seed = seed}, [&] {
    auto* numbers = reinterpret_cast<int*>(simt::shared());
    numbers[simt::thread()] = simt::thread();
    if (!forget) simt::sync_block();
    simt::sync_warp();
    const int next = (simt::thread() + 1) % 128;
    wrong += numbers[next] != next;
  });
  return wrong;
}

TEST(SimtTest, MissingBarrierShows) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(wrong_neighbours(false, seed), 0) << "seed " << seed;
    EXPECT_GT(wrong_neighbours(true, seed), 0) << "seed " << seed;
  }
}

float last_copied(int groups_left) {
  const std::vector<float> from{1, 2, 3, 4, 5, 6, 7, 8};
  float result = 0;
  emulate({.shared_bytes = 32}, [&] {
    if (simt::thread() != 0) return;
    auto* to = reinterpret_cast<float*>(simt::shared());
    for (int group = 0; group < 2; ++group) {
      simt::copy_async(to + 4 * group, from.data() + 4 * group, true);
      simt::commit_copies();
    }
    groups_left == 0 ? simt::wait_copies<0>() : simt::wait_copies<1>();
    result = to[3] + to[7];
  });
  return result;
}

TEST(SimtTest, CopiesArriveWhenTheyAreWaitedFor) {
  EXPECT_EQ(last_copied(0), 12);
  EXPECT_TRUE(std::isnan(last_copied(1)));
}

TEST(SimtTest, RefusesWhatHangsOrIsUndefined) {
  EXPECT_THROW(emulate({.threads = 64},
                       [] {
                         if (simt::warp() == 0) simt::sync_block();
                       }),
               std::logic_error);
  EXPECT_THROW(emulate({},
                       [] {
                         if (simt::lane() < 16) simt::shuffle_xor(1, 1);
                       }),
               std::logic_error);
  EXPECT_THROW(emulate({}, [] { simt::lane() < 16 ? void(simt::ballot(true)) : simt::sync_warp(); }),
               std::logic_error);
  EXPECT_THROW(emulate({.shared_bytes = 64},
                       [] {
                         uint32_t r[4];
                         simt::load_matrices(r, simt::shared() + 8);
                       }),
               std::logic_error);
  alignas(16) const float numbers[8] = {};
  EXPECT_THROW(emulate({}, [&] { simt::load_vector(numbers + 1); }), std::logic_error);
  EXPECT_THROW(emulate({.threads = 40}, [] {}), std::logic_error);
}

}  // namespace
}  // namespace espalier
