// SPDX-License-Identifier: Apache-2.0
// ESPALIER_CUDA_FORESTS: how many forests (default 50), from ESPALIER_CUDA_FIRST_FOREST (default 0) on.
#include <cstdlib>
#include <string>

#include "espalier/ops/attention/cuda.h"
#include "tests/ops/attention/forced_attention.h"
#include "tests/ops/attention/random_forests.h"
#include "tests/ops/cuda_device.h"

namespace espalier {
namespace {

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* given = std::getenv(variable);
  return given == nullptr ? otherwise : std::stoull(given);
}

/// Of the forests that are asked for, those with a dtype that is `wanted`.
template <class Wanted>
void expect_all_right(Wanted wanted) {
  const uint64_t first = number("ESPALIER_CUDA_FIRST_FOREST", 0);
  const uint64_t end = first + number("ESPALIER_CUDA_FORESTS", 50);
  for (uint64_t seed = first; seed < end && !::testing::Test::HasFatalFailure(); ++seed) {
    if (!wanted(testing::random_forests::dtype_of(seed))) continue;
    testing::random_forests::expect_right(seed, {at::kCUDA, 0}, seed % 2 == 0 ? 100 : 12);
  }
}

TEST(RandomForests, TreeAttentionOnCuda) {
  SKIP_WITHOUT_CUDA();
  expect_all_right([](at::ScalarType) { return true; });
}

TEST(RandomForests, TreeAttentionOnHopper) {
  SKIP_WITHOUT_CUDA();
  const testing::ForcedAttention forced("hopper");
  try {
    attention_kind({at::kBFloat16, 64});
  } catch (const c10::Error&) {
    GTEST_SKIP() << "no kernels for Hopper for this device in this build";
  }
  expect_all_right([](at::ScalarType dtype) { return dtype == at::kBFloat16; });
}

}  // namespace
}  // namespace espalier
