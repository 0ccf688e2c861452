// SPDX-License-Identifier: Apache-2.0
// Which kernels are right on a GPU. The judge is Python's (python/espalier/kernels); here its verdicts are
// read.
#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "espalier/ops/kernel_choice.h"
#include "espalier/runtime/cuda_software.h"

namespace espalier {

struct KernelVerdict {
  std::string family{};
  bool is_served = false;  // whether the device supports any of it
  std::string fault{};     // empty: none
  /// Whether it is about the kernels; false if the check could not be made, for instance for want of memory.
  bool is_lasting = true;
};

/// The verdicts in a text of the judge, {"verdicts": {FAMILY: {"checks", "fault", "is_lasting"}}}. What is
/// damaged is left out.
std::vector<KernelVerdict> parse_verdicts(const std::string& text);

/// What verdicts on a device are kept under.
nlohmann::json verdict_key(const CudaDriver& driver, const LibTorchCuda& torch, int index);

/// The verdicts in the file of `folder` whose "key" is this one; none: no such file.
std::vector<KernelVerdict> kept_verdicts(const nlohmann::json& key, const std::filesystem::path& folder);

/// Gives the text of the verdicts on the CUDA device of an index, kept or new.
using KernelJudge = std::function<std::string(int index)>;

/// From here on proven_kernels_on asks this judge for what is not kept.
void judge_kernels_by(KernelJudge judge);

/// The kernels that are right on the CUDA device of this index. Says once what is not used or cannot be
/// trusted, unless the environment names it (with_environment). Without such a device, those of a process
/// that asks nobody. To be called before the device is opened: a check that breaks it shall not break this
/// process.
CudaKernels proven_kernels_on(int index);

/// What follows from verdicts. A family without a lasting verdict is not used where there is a plain form.
struct ProvenKernels {
  CudaKernels kernels{.attention = {}, .head = false};
  /// What is not used or cannot be trusted, why, and the command that shows it; empty: nothing.
  std::string warning{};
  std::vector<std::string> missing{};  // families without a verdict
};
ProvenKernels proven_kernels(const std::vector<KernelVerdict>& verdicts, const std::string& device_name,
                             int index);

}  // namespace espalier
