// SPDX-License-Identifier: Apache-2.0
// Predicted FLOPs, time and memory of a step, and the measured ones.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "espalier/engine/step.h"
#include "espalier/plan/loss_work.h"
#include "espalier/plan/memory_model.h"
#include "espalier/plan/planner.h"

namespace espalier {

/// The positions of the terms of the step.
LossPositions loss_positions(const Step& step);

/// loss_flops of the step's plan and terms.
LossFlops loss_flops(const ModelCost& model, const Step& step);

/// Predicted seconds and bytes of a step's micro-batches, by index in the plan; 0 for those that do not run.
struct StepPrediction {
  std::vector<Load> loads;
  std::vector<double> seconds;
  std::vector<double> peak_bytes;
  double logprob_pass_seconds = 0;  // of a pass that only computes log-probabilities

  double total_seconds() const;  // sum of the above
  double largest_peak_bytes() const;
};
/// `logprob_pass`: whether the step needs a log-prob pass (needs_logprob_pass in engine/order.h).
StepPrediction predict_step(const PlanCosts& costs, const Step& step, bool logprob_pass = false);

/// loads_with_loss of the step's micro-batches. `windows`: ModelCost::sliding_windows of the model.
std::vector<Load> step_loads(const Step& step, std::span<const int64_t> windows = {});

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
