// SPDX-License-Identifier: Apache-2.0
// Profile of one step.
#pragma once

#include <ATen/record_function.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "espalier/base/file.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"

namespace espalier {

/// Makes the table of where the time went (python/espalier/printed/profile.py has the arguments).
using ProfileText = std::function<std::string(const nlohmann::json& arguments)>;

/// Records a step with LibTorch's profiler: operators, nodes of the backward pass, and the regions that
/// engine and decoder mark (RECORD_USER_SCOPE). On the CPU, time is counted on the calling thread. On CUDA,
/// kernels and copies count as the operator that launched them. At most one recording at a time per process.
class Profiler {
 public:
  /// stop() writes `trace` in Chrome's format (chrome://tracing, ui.perfetto.dev). Throws InputError early if
  /// the file cannot be written.
  Profiler(const std::filesystem::path& trace, at::Device device, ProfileText text_of);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Call before the step.
  void start();

  /// Call after the step with its result. Synchronises the device, writes the trace, measures the rate of a
  /// matrix product (in the model's dtype: [2048, 1024] by [1024, 1024]; on CUDA 8192 cubed) and returns the
  /// table.
  std::string stop(const Decoder& decoder, const StepResult& result);

 private:
  std::filesystem::path trace_;
  at::Device device_;
  ProfileText text_of_;
  AtomicFile file_;
  std::unique_ptr<at::RecordFunction> step_;  // the region around the step; null while not recording
};

}  // namespace espalier
