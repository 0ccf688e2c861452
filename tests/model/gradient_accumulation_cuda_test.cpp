// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/model/parameter_sums.h"
#include "tests/ops/cuda_device.h"

namespace espalier::testing {
namespace {

TEST(ParameterOpsCuda, RoundNoSumOfBfloat16Gradients) {
  SKIP_WITHOUT_CUDA();
  expect_unrounded_sums(at::kCUDA);
}

}  // namespace
}  // namespace espalier::testing
