// SPDX-License-Identifier: Apache-2.0
// The kernels of this build prove themselves on a GPU when it is first used (qualify/qualify.h).
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "espalier/ops/kernel_choice.h"
#include "espalier/qualify/qualify.h"
#include "espalier/runtime/cuda_software.h"

namespace espalier {

/// The process that checks a family of kernels on a device ("cuda:0") and writes its finding into a file: a
/// program, which calls run_check with these three, and its arguments.
using KernelCheckCommand = std::function<std::vector<std::string>(
    const std::string& family, const std::string& device, const std::filesystem::path& finding)>;

/// From here on prove_kernels checks kernels, by such processes. Without, prove_kernels does nothing.
void check_kernels_by(KernelCheckCommand command);

/// By running this program again: to be called by the program espalier alone.
void check_kernels_by_this_program();

/// The kernels that are right on the CUDA device of this index. Warns once of
/// what is not used or cannot be trusted, unless the environment names it (with_environment). Checks the
/// kernels where no verdict is kept, once in a process. Those of a process that checks nothing where there is
/// no such device. To be called before the device is opened: a check that breaks it shall not break this
/// process.
CudaKernels prove_kernels(int index);

/// The verdicts on all families of kernels on this device (qualify/families.h), kept or new (`again`: new),
/// by processes as check_kernels_by says.
std::vector<qualify::Verdict> kernel_verdicts(const CudaDriver& driver, const LibTorchCuda& torch, int index,
                                              bool again);

/// What follows from verdicts. A check that could not be made (Verdict::lasting) leaves a family as it is
/// without one.
struct ProvenKernels {
  CudaKernels kernels{.attention = {}};
  /// What is not used or cannot be trusted, why, and the command that shows it; empty: nothing.
  std::string warning{};
};
ProvenKernels proven_kernels(const std::vector<qualify::Verdict>& verdicts, const std::string& device_name,
                             int index);

/// The check of one family on one device, in this process: `espalier device --check`. With a file the finding
/// goes there, and a fault of the kernels is no error; without one the finding is printed. Returns the exit
/// status.
int run_check(const std::string& family, const std::string& device, const std::filesystem::path& finding);

}  // namespace espalier
