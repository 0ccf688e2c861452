// SPDX-License-Identifier: Apache-2.0
// Measured time and memory of the micro-batches of a step.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace espalier {

/// Time and memory of one micro-batch.
struct MicroBatchMeasure {
  int64_t micro_batch = 0;  // index in the plan
  double seconds = 0;       // forward, backward and recomputation, without descendants
  int64_t peak_bytes = 0;   // peak bytes of tensors on the model's device; 0 if not available
};

/// Measures of the micro-batches of one step.
struct StepMeasures {
  std::vector<MicroBatchMeasure> measured{};        // micro-batches that ran, in the order of the plan
  std::optional<MicroBatchMeasure> logprob_pass{};  // the log-prob pass, over all micro-batches; micro_batch
                                                    // is -1

  double measured_seconds() const;  // sum of the above
  int64_t measured_peak_bytes() const;
};

}  // namespace espalier
