// SPDX-License-Identifier: Apache-2.0
// What the GPU kernels of this build were built by and for.
#pragma once

namespace espalier::cli {

/// The version of nvcc, such as "13.0.88", and CMAKE_CUDA_ARCHITECTURES, separated by commas ("80,90-real").
/// Both empty in a build without CUDA.
extern const char* const kNvcc;
extern const char* const kCudaArchitectures;

}  // namespace espalier::cli
