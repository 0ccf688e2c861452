// SPDX-License-Identifier: Apache-2.0
#include "tests/torch_seed.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

class SeedTorch : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { seed_torch(1); }
};

// GoogleTest owns its listeners.
[[maybe_unused]] const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new SeedTorch);
  return true;
}();

}  // namespace

void seed_torch(uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(test_seed(seed));
}

}  // namespace espalier::testing
