// SPDX-License-Identifier: Apache-2.0
// Profile of one step.
#pragma once

#include <ATen/record_function.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "espalier/base/file.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"

namespace espalier {

/// Wall seconds that a step spent on one kind of work, on the CPU or on the GPU if that is the device. All
/// rows add up to the step.
struct ProfileRow {
  std::string work;  // linear, attention, head, norm, ..., `other`, or `idle` for a GPU
  std::string part;  // forward, backward; for linear maps: gradient of input, gradient of weight
  double seconds = 0;
  double flops = 0;  // as counted by plan/cost_model.h; 0: not counted
};

struct ProfileSummary {
  std::filesystem::path trace;
  double seconds = 0;  // duration of the step
  double gemm_flops_per_second =
      0;  // of one matrix product in the model's dtype: [2048, 1024] by [1024, 1024]; on CUDA 8192 cubed
  std::vector<ProfileRow> rows;  // longest first

  /// Seconds that the counted FLOPs would take at the GEMM rate.
  double gemm_bound_seconds() const;
  std::string text() const;
};

/// Records a step with LibTorch's profiler: operators, nodes of the backward pass, and the regions that
/// engine and decoder mark (RECORD_USER_SCOPE). On the CPU, time is counted on the calling thread. On CUDA,
/// kernels and copies count as the operator that launched them. At most one recording at a time per process.
class Profiler {
 public:
  /// stop() writes `trace` in Chrome's format (chrome://tracing, ui.perfetto.dev). Throws InputError early if
  /// the file cannot be written.
  explicit Profiler(const std::filesystem::path& trace, at::Device device = at::kCPU);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Call before the step.
  void start();

  /// Call after the step with its result. Synchronises the device, writes the trace and measures the GEMM
  /// rate.
  ProfileSummary stop(const Decoder& decoder, const StepResult& result);

 private:
  std::filesystem::path trace_;
  at::Device device_;
  AtomicFile file_;
  std::unique_ptr<at::RecordFunction> step_;  // the region around the step; null while not recording
};

}  // namespace espalier
