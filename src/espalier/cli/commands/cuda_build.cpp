// SPDX-License-Identifier: Apache-2.0
// CMake's values for the GPU kernels in this build.
#include "espalier/cli/commands/device_kernels.h"

namespace espalier::cli {

const char* const kNvcc = ESPALIER_NVCC;
const char* const kCudaArchitectures = ESPALIER_CUDA_ARCHITECTURES;

}  // namespace espalier::cli
