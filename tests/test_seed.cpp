// SPDX-License-Identifier: Apache-2.0
#include "tests/test_seed.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace espalier::testing {
namespace {

// Seeds of tests are small numbers: a step of this size, a prime, leads away from all of them.
constexpr uint64_t kStep = 1'000'003;

uint64_t given_number() {
  const char* text = std::getenv("ESPALIER_TEST_SEED");
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  errno = 0;
  const uint64_t number = std::strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end != '\0' || errno != 0 || number > UINT32_MAX) {
    std::fprintf(stderr, "ESPALIER_TEST_SEED: expected a whole number below 2^32, received %s\n", text);
    std::exit(2);
  }
  return number;
}

uint64_t number() {
  static const uint64_t once = given_number();
  return once;
}

class SeedOutput : public ::testing::EmptyTestEventListener {
  void OnTestProgramStart(const ::testing::UnitTest&) override { print(); }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed()) print();
  }
  static void print() {
    std::printf("ESPALIER_TEST_SEED=%llu\n", static_cast<unsigned long long>(number()));
    std::fflush(stdout);
  }
};

// GoogleTest owns its listeners.
[[maybe_unused]] const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new SeedOutput);
  return true;
}();

int pinned = 0;

}  // namespace

uint64_t test_seed(uint64_t seed) {
  return pinned > 0 ? seed : seed + kStep * number();
}

PinnedSeeds::PinnedSeeds() {
  ++pinned;
}

PinnedSeeds::~PinnedSeeds() {
  --pinned;
}

}  // namespace espalier::testing
