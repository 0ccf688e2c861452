// SPDX-License-Identifier: Apache-2.0
// ESPALIER_CUDA_FORESTS: how many forests (default 50), from ESPALIER_CUDA_FIRST_FOREST (default 0) on.
#include <cstdlib>
#include <string>

#include "tests/ops/attention/random_forests.h"
#include "tests/ops/cuda_device.h"

namespace espalier {
namespace {

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* given = std::getenv(variable);
  return given == nullptr ? otherwise : std::stoull(given);
}

TEST(RandomForests, TreeAttentionOnCuda) {
  SKIP_WITHOUT_CUDA();
  const uint64_t first = number("ESPALIER_CUDA_FIRST_FOREST", 0);
  const uint64_t end = first + number("ESPALIER_CUDA_FORESTS", 50);
  for (uint64_t seed = first; seed < end && !::testing::Test::HasFatalFailure(); ++seed) {
    testing::random_forests::expect_right(seed, {at::kCUDA, 0}, seed % 2 == 0 ? 100 : 12);
  }
}

}  // namespace
}  // namespace espalier
