// SPDX-License-Identifier: Apache-2.0
// The kernels of this build prove themselves on a GPU when it is first used (qualify/qualify.h).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "espalier/ops/attention/cuda.h"
#include "espalier/qualify/qualify.h"
#include "espalier/runtime/cuda_software.h"

namespace espalier::cli {

/// From here on prove_kernels checks kernels, by running this program again: to be called by the program
/// espalier alone. In other processes, such as Python's, prove_kernels does nothing.
void check_kernels_by_this_program();

/// Lets attention choose among the implementations that are right on the CUDA device of this index, hopper
/// among them, and warns once of those that are not used. Checks them where no verdict is kept. Does nothing
/// where ESPALIER_ATTENTION names one, or where there is no such device. To be called before the device is
/// opened: a check that breaks it shall not break this process.
void prove_kernels(int index);

/// The verdicts on attention on this device, kept or new (`again`: new), by processes of this program.
std::vector<Verdict> kernel_verdicts(const CudaDriver& driver, const LibTorchCuda& torch, int index,
                                     bool again);

/// What follows from verdicts.
struct ProvenAttention {
  std::vector<AttentionKind> kinds{};
  std::string warning{};  // what is not used, why, and the command that shows it; empty: nothing
};
ProvenAttention proven_attention(const std::vector<Verdict>& verdicts, const std::string& device_name,
                                 int index);

/// The check of one family on one device, in this process: `espalier device --check`. With a file the finding
/// goes there, and a fault of the kernels is no error; without one the finding is printed. Returns the exit
/// status.
int run_check(const std::string& family, const std::string& device, const std::filesystem::path& finding);

}  // namespace espalier::cli
