// ESPALIER_CUDA_FORESTS: how many forests (default 50).
#include <cstdlib>
#include <string>

#include "tests/ops/cuda_device.h"
#include "tests/ops/random_forests.h"

namespace espalier {
namespace {

using testing::random_forests::expect_right;

TEST(RandomForests, TreeAttentionOnCuda) {
  SKIP_WITHOUT_CUDA();
  const char* given = std::getenv("ESPALIER_CUDA_FORESTS");
  const uint64_t count = given == nullptr ? 50 : std::stoull(given);
  for (uint64_t seed = 0; seed < count && !HasFatalFailure(); ++seed) {
    expect_right(seed, {at::kCUDA, 0}, seed % 2 == 0 ? 100 : 12);
  }
}

}  // namespace
}  // namespace espalier
