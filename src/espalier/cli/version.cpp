// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/version.h"

#include <fmt/format.h>

#include "espalier/ops/kernels/cpu/instruction_set.h"

namespace espalier::cli {

std::string version_text() {
  return fmt::format(
      "espalier {}\n"
      "commit: {}\n"
      "compiler: {}\n"
      "build type: {}\n"
      "LibTorch: {}\n"
      "CUDA: {}\n"
      "instruction set: {}",
      ESPALIER_VERSION, kCommit, ESPALIER_COMPILER, ESPALIER_BUILD_TYPE, ESPALIER_LIBTORCH, ESPALIER_CUDA,
      instruction_set_name(instruction_set()));
}

}  // namespace espalier::cli
