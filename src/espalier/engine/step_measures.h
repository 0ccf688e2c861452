// SPDX-License-Identifier: Apache-2.0
// What the micro-batches of a step took.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace espalier {

/// What one micro-batch took.
struct MicroBatchMeasure {
  int64_t micro_batch = 0;  // index in the plan
  double seconds = 0;       // forward, backward and recomputation; not its descendants'
  int64_t peak_bytes = 0;   // most bytes of tensors meanwhile, on the model's device; 0 where nothing counts
};

/// Of the micro-batches of one step.
struct StepMeasures {
  std::vector<MicroBatchMeasure> measured{};        // of the micro-batches that ran, in the order of the plan
  std::optional<MicroBatchMeasure> logprob_pass{};  // of the pass that computes log-probabilities and routes
                                                    // alone, all micro-batches together; micro_batch is -1

  double measured_seconds() const;  // all of these
  int64_t measured_peak_bytes() const;
};

}  // namespace espalier
