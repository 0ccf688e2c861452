// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/cuda_software.h"

#include <gtest/gtest.h>
#include <torch/version.h>

namespace espalier::testing {
namespace {

CudaDriver some_driver() {
  return {.found = true, .version = "580.65.06", .cuda = 13000, .devices = {{"NVIDIA H200", 90, 1 << 30}}};
}

LibTorchCuda some_libtorch() {
  return {.found = true, .version = "13.0", .folder = "/torch/lib"};
}

TEST(CudaSoftware, ADriverServesItsMajorVersionAndThoseBefore) {
  for (const char* version : {"12.6", "13.0", "13.2", ""}) {
    LibTorchCuda torch = some_libtorch();
    torch.version = version;
    EXPECT_EQ(cuda_fault(some_driver(), torch), "") << version;
  }
  CudaDriver old = some_driver();
  old.version = "550.54.15";
  old.cuda = 12040;
  EXPECT_EQ(
      cuda_fault(old, some_libtorch()),
      "LibTorch was built with CUDA 13.0, the driver 550.54.15 serves CUDA up to 12.4: a newer driver or a "
      "LibTorch for CUDA 12.4 is needed");
}

TEST(CudaSoftware, WhatIsMissingIsNamed) {
  EXPECT_EQ(cuda_fault(some_driver(), {.folder = "/torch/lib"}),
            "LibTorch was built without CUDA: no libtorch_cuda.so in /torch/lib");
  EXPECT_EQ(cuda_fault({}, some_libtorch()), "no NVIDIA driver: there is no libcuda.so.1");
  CudaDriver driver = some_driver();
  driver.devices.clear();
  const char* invisible = "no CUDA device is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)";
  EXPECT_EQ(cuda_fault(driver, some_libtorch()), invisible);
  driver.error = "CUDA_ERROR_NO_DEVICE";
  EXPECT_EQ(cuda_fault(driver, some_libtorch()), invisible);
  driver.error = "CUDA_ERROR_SYSTEM_NOT_READY";
  EXPECT_EQ(cuda_fault(driver, some_libtorch()),
            "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_NOT_READY");
}

TEST(CudaSoftware, TheAutomaticDeviceIsTheFirstGpuThatCanBeUsed) {
  const AutomaticDevice gpu = automatic_device(some_driver(), some_libtorch());
  EXPECT_EQ(gpu.device, at::Device(at::kCUDA, 0));
  EXPECT_EQ(gpu.reason, "NVIDIA H200");
  const AutomaticDevice cpu = automatic_device({}, some_libtorch());
  EXPECT_EQ(cpu.device, at::Device(at::kCPU));
  EXPECT_EQ(cpu.reason, "no NVIDIA driver: there is no libcuda.so.1");
}

TEST(CudaSoftware, ThisMachineAnswers) {
  const LibTorchCuda torch = libtorch_cuda();
  EXPECT_FALSE(torch.folder.empty());
  const CudaDriver driver = cuda_driver();
  if (!driver.found) {
    EXPECT_TRUE(driver.devices.empty());
    EXPECT_EQ(automatic_device(driver, torch).device, at::Device(at::kCPU));
  }
  for (const CudaDevice& device : driver.devices) {
    EXPECT_FALSE(device.name.empty());
    EXPECT_GE(device.compute_capability, 30);
    EXPECT_GT(device.memory_bytes, 0U);
  }
  EXPECT_EQ(cuda_version_text(13000), "13.0");
  EXPECT_EQ(cuda_version_text(12080), "12.8");
  EXPECT_EQ(cuda_version_text(0), "unknown");
}

}  // namespace
}  // namespace espalier::testing
