// SPDX-License-Identifier: Apache-2.0
// Which of Espalier's GPU kernels a device can run, and from what code.
#pragma once

#include <string>
#include <string_view>

namespace espalier::cli {

/// The version of the nvcc that built the kernels, such as "13.0.88", and their CMAKE_CUDA_ARCHITECTURES,
/// separated by commas ("80,90-real"). Both empty in a build without CUDA.
extern const char* const kNvcc;
extern const char* const kCudaArchitectures;

enum class KernelCode {
  kNone,
  kMachineCode,
  kPtx,  // intermediate code, which the driver compiles when it is first loaded
};

/// "machine code", "PTX, compiled by the driver" or "none".
std::string_view to_string(KernelCode code);

/// The code of kernels that need compute capability 8.0, built for `architectures`. Machine code runs on
/// devices of the same major and the same or a later minor version; for names with an `a`, on exactly this
/// version. PTX, which all but names ending in -real include, runs on every later device (CUDA C++
/// Programming Guide, "Application Compatibility").
KernelCode ampere_code(int compute_capability, std::string_view architectures);

}  // namespace espalier::cli
