// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/commands/device_kernels.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

using cli::ampere_code;
using cli::hopper_code;
using cli::KernelCode;

TEST(DeviceKernels, MachineCodeServesItsMajorVersionAndPtxAllLaterOnes) {
  constexpr const char* kDefault = "80,90a-real";
  for (const int own : {80, 86, 89, 90}) {
    EXPECT_EQ(ampere_code(own, kDefault), KernelCode::kMachineCode) << own;
  }
  for (const int later : {100, 103, 120, 121}) {
    EXPECT_EQ(ampere_code(later, kDefault), KernelCode::kPtx) << later;
  }
  for (const int before : {0, 61, 70, 75}) {
    EXPECT_EQ(ampere_code(before, kDefault), KernelCode::kNone) << before;
  }
}

TEST(DeviceKernels, NamesOfArchitecturesSayWhichCodeThereIs) {
  EXPECT_EQ(ampere_code(90, "80-real"), KernelCode::kNone);
  EXPECT_EQ(ampere_code(89, "80-virtual"), KernelCode::kPtx);
  EXPECT_EQ(ampere_code(80, "86"), KernelCode::kNone);
  EXPECT_EQ(ampere_code(90, "80-virtual,86-real"), KernelCode::kPtx);
  EXPECT_EQ(ampere_code(100, "90a"), KernelCode::kNone);  // of that version alone, PTX too
  EXPECT_EQ(ampere_code(120, "80,120-real"), KernelCode::kMachineCode);
  EXPECT_EQ(ampere_code(90, ""), KernelCode::kNone);
}

TEST(DeviceKernels, HoppersRunOnHopperAlone) {
  EXPECT_EQ(hopper_code(90, "80,90a-real"), KernelCode::kMachineCode);
  EXPECT_EQ(hopper_code(90, ""), KernelCode::kNone);
  for (const int other : {80, 89, 100, 120}) {
    EXPECT_EQ(hopper_code(other, "80,90a-real"), KernelCode::kNone) << other;
  }
}

}  // namespace
}  // namespace espalier::testing
