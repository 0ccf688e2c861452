// SPDX-License-Identifier: Apache-2.0
// Detection of CUDA: the driver with its devices, and the CUDA version of LibTorch. Does not load LibTorch's
// CUDA libraries.
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
  bool found = false;                 // libcuda.so.1
  std::string error{};                // error if the driver does not start, such as CUDA_ERROR_UNKNOWN
  std::string version{};              // driver version, such as 580.65.06; empty: unknown
  int cuda = 0;                       // latest supported CUDA: 1000 major + 10 minor
  std::vector<CudaDevice> devices{};  // visible devices
};

/// Uses the driver API, without CUDA headers or libraries.
CudaDriver cuda_driver();

struct LibTorchCuda {
  bool found = false;     // libtorch_cuda.so, in `folder`
  std::string version{};  // torch.version.cuda, such as "13.0"; empty: unknown
  std::string folder{};   // of LibTorch's libraries
};

/// The CUDA of this process's LibTorch, from its version.py or build-version.
LibTorchCuda libtorch_cuda();

/// "13.0" for 13000; "unknown" for 0.
std::string cuda_version_text(int cuda);

/// Why no CUDA device can be used; empty if one can. A driver supports all CUDA versions up to its own major
/// version.
std::string cuda_fault(const CudaDriver& driver, const LibTorchCuda& torch);

/// The device that --device auto selects.
struct AutomaticDevice {
  c10::Device device = c10::Device(c10::kCPU);
  std::string reason;  // name of the device, or why the CPU is used
};

/// The first visible CUDA device if cuda_fault is empty, otherwise the CPU.
AutomaticDevice automatic_device(const CudaDriver& driver, const LibTorchCuda& torch);

}  // namespace espalier
