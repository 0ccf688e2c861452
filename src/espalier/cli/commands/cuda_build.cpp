// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/commands/cuda_build.h"

namespace espalier::cli {

const char* const kNvcc = ESPALIER_NVCC;
const char* const kCudaArchitectures = ESPALIER_CUDA_ARCHITECTURES;

}  // namespace espalier::cli
