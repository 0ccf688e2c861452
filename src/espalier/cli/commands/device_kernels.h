// SPDX-License-Identifier: Apache-2.0
// Which of our own GPU kernels a device can run, and from what code.
#pragma once

#include <string>
#include <string_view>

namespace espalier::cli {

/// The version of the nvcc that built the kernels, such as "13.0.88", and what it built them for, in CMake's
/// words and separated by commas ("80,90a-real"). Both empty in a build without CUDA.
extern const char* const kNvcc;
extern const char* const kCudaArchitectures;

enum class KernelCode {
  kNone,
  kMachineCode,
  kPtx,  // intermediate code, which the driver compiles when it is loaded first
};

/// "machine code", "PTX, compiled by the driver" or "none".
std::string_view to_string(KernelCode code);

/// The code of kernels that need compute capability 8.0, built for `architectures`. Machine code serves
/// devices of its own major version that are no older, that of names with an `a` their very version alone;
/// PTX, which all but names ending in -real have, every later device (CUDA C++ Programming Guide,
/// "Application Compatibility").
KernelCode ampere_code(int compute_capability, std::string_view architectures);

/// The code of the kernels that are built for compute capability 9.0 alone.
KernelCode hopper_code(int compute_capability, std::string_view architectures);

}  // namespace espalier::cli
