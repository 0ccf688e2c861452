// SPDX-License-Identifier: Apache-2.0
// Where the time of one step goes.
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

/// Wall seconds that a step spent on one kind of work: of the CPU, or of the GPU where that is the device.
/// The shares of all rows add up to the step.
struct ProfileRow {
  std::string work;  // linear, attention, head, norm, ...; what fits no kind is `other`; a GPU may be `idle`
  std::string part;  // forward, backward; of linear maps: gradient of input, gradient of weight
  double seconds = 0;
  double flops = 0;  // by plan/cost_model.h; 0: not counted there
};

struct ProfileSummary {
  std::filesystem::path trace;
  double seconds = 0;  // of the step
  double gemm_flops_per_second =
      0;  // of one matrix product in the model's dtype: [2048, 1024] by [1024, 1024]; on CUDA 8192 cubed
  std::vector<ProfileRow> rows;  // longest first

  /// Seconds that the counted FLOPs would take at the rate of that product.
  double gemm_bound_seconds() const;
  std::string text() const;
};

/// Records a step with LibTorch's profiler: operators, nodes of the backward pass, and the regions that the
/// engine and the decoder name (RECORD_USER_SCOPE). On the CPU work is counted on the calling thread alone:
/// that is all of a step. On CUDA kernels and copies are recorded too, and count as the operator that
/// launched them. One at a time in a process.
class Profiler {
 public:
  /// `trace` is written by stop(), in Chrome's format (chrome://tracing, ui.perfetto.dev). Throws InputError
  /// here if it cannot be, so that nobody has to wait for that.
  explicit Profiler(const std::filesystem::path& trace, at::Device device = at::kCPU);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// The step begins.
  void start();

  /// The step, which gave `result`, has ended (its device is waited for): writes the trace and measures the
  /// rate of matrix products.
  ProfileSummary stop(const Decoder& decoder, const StepResult& result);

 private:
  std::filesystem::path trace_;
  at::Device device_;
  AtomicFile file_;
  std::unique_ptr<at::RecordFunction> step_;  // the region around everything; null while not recording
};

}  // namespace espalier
