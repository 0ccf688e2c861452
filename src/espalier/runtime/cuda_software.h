// SPDX-License-Identifier: Apache-2.0
// What there is of CUDA: the driver with its devices, and the CUDA that LibTorch was built with. Asking loads
// nothing of LibTorch.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace espalier {

struct CudaDevice {
  std::string name;
  int compute_capability = 0;  // 10 major + minor: 80, 90
  uint64_t memory_bytes = 0;
};

struct CudaDriver {
  bool found = false;     // libcuda.so.1
  std::string error{};    // what the driver says where it does not start, such as CUDA_ERROR_UNKNOWN
  std::string version{};  // of the driver, such as 580.65.06; empty: unknown
  int cuda = 0;           // the latest CUDA that it serves: 1000 major + 10 minor
  std::vector<CudaDevice> devices{};  // those that are visible
};

/// By the driver's own interface, which needs neither CUDA's headers nor its libraries.
CudaDriver cuda_driver();

struct LibTorchCuda {
  bool found = false;     // libtorch_cuda.so, in `folder`
  std::string version{};  // torch.version.cuda, such as "13.0"; empty: unknown
  std::string folder{};   // of LibTorch's libraries
};

/// Of the LibTorch that this process runs on: by its version.py or build-version.
LibTorchCuda libtorch_cuda();

/// "13.0" of 13000; "unknown" of 0.
std::string cuda_version_text(int cuda);

/// Why no CUDA device can be used, in a few words; empty where one can. A driver serves every CUDA of its own
/// major version and of those before.
std::string cuda_fault(const CudaDriver& driver, const LibTorchCuda& torch);

/// What --device auto means here.
struct AutomaticDevice {
  c10::Device device = c10::Device(c10::kCPU);
  std::string reason;  // the name of the device, or why it is the CPU
};

/// The first visible CUDA device where cuda_fault finds nothing, otherwise the CPU.
AutomaticDevice automatic_device(const CudaDriver& driver, const LibTorchCuda& torch);

}  // namespace espalier
