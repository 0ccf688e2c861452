// SPDX-License-Identifier: Apache-2.0
// Blocked products whose tasks several threads take from one counter: bitwise identical as by one thread.
#include "espalier/ops/kernels/cpu/products/blocked_product.h"

#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <random>
#include <vector>

#include "tests/ops/kernels/cpu/instruction_sets.h"
#include "tests/ops/kernels/cpu/run_in_threads.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::make_scratch;
using testing::run_in_threads;

constexpr int64_t kRows = 70, kColumns = 90, kDepth = 200;

template <class Element>
std::vector<Element> random_elements(int64_t count, uint64_t seed) {
  std::mt19937_64 random(testing::test_seed(seed));
  std::vector<Element> elements(count);
  for (Element& element : elements) {
    const auto x = static_cast<float>(std::normal_distribution<double>()(random));
    if constexpr (std::is_same_v<Element, BFloat16>) {
      element = {static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16)};
    } else {
      element = x;
    }
  }
  return elements;
}

template <class Element>
std::vector<float> multiply_in_threads(InstructionSet isa, int threads) {
  using Word = WordOf<Element>;
  const std::vector<Element> a = random_elements<Element>(kRows * kDepth, 1);
  const std::vector<Element> b = random_elements<Element>(kDepth * kColumns, 2);
  const BlockedProduct<Element> product({a.data(), kDepth, 1, kRows, kDepth},
                                        {b.data(), 1, kColumns, kColumns, kDepth}, isa, 4);
  EXPECT_GT(product.num_tasks(), 1);
  static_assert(sizeof(Word) == sizeof(float));
  const auto packed = make_scratch<float>(product.packed_words());
  auto* words = reinterpret_cast<Word*>(packed.get());
  std::vector<float> c(kRows * kColumns);
  std::atomic<int64_t> next{0};
  run_in_threads(threads, [&](int) {
    for (int64_t task = next++; task < product.num_pack_tasks(); task = next++) product.pack(task, words);
  });
  next = 0;
  run_in_threads(threads, [&](int) {
    const auto scratch = make_scratch<float>(product.scratch_words(false));
    for (int64_t task = next++; task < product.num_tasks(); task = next++) {
      product.multiply(task, words, reinterpret_cast<Word*>(scratch.get()),
                       ProductResult<float>{c.data(), kColumns}, false, nullptr);
    }
  });
  return c;
}

TEST(BlockedProductThreads, ProductsAreTheSameBits) {
  for (const InstructionSet isa : testing::instruction_sets_of_this_machine()) {
    SCOPED_TRACE(std::string(instruction_set_name(isa)));
    EXPECT_EQ(multiply_in_threads<float>(isa, 4), multiply_in_threads<float>(isa, 1));
    EXPECT_EQ(multiply_in_threads<BFloat16>(isa, 4), multiply_in_threads<BFloat16>(isa, 1));
  }
}

}  // namespace
}  // namespace espalier
