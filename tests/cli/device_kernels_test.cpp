// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/commands/device_kernels.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

using cli::ampere_code;
using cli::KernelCode;

TEST(DeviceKernels, MachineCodeServesItsMajorVersionAndPtxAllLaterOnes) {
  constexpr const char* kDefault = "80,90-real";
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

}  // namespace
}  // namespace espalier::testing
