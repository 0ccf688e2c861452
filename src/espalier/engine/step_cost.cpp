// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/step_cost.h"

#include <algorithm>
#include <numeric>

namespace espalier {

LossPositions loss_positions(const Step& step) {
  LossPositions loss;
  loss.offsets = step.terms.offsets;
  loss.values.reserve(step.terms.values.size());
  for (const Term& term : step.terms.values) loss.values.push_back(term.position);
  return loss;
}

LossFlops loss_flops(const ModelCost& model, const Step& step) {
  return loss_flops(model, step.forest, step.plan, loss_positions(step));
}

std::vector<Load> step_loads(const Step& step, std::span<const int64_t> windows) {
  return loads_with_loss(step.forest, step.plan, loss_positions(step), windows);
}

StepPrediction predict_step(const PlanCosts& costs, const Step& step, bool logprob_pass) {
  MemoryModel memory = costs.memory;
  memory.checkpoint_activations = step.plan.options.checkpoint_activations;
  StepPrediction prediction;
  prediction.loads = step_loads(step, costs.time.cost.sliding_windows());
  prediction.peak_bytes = peak_bytes(memory, prediction.loads);
  for (size_t m = 0; m < prediction.loads.size(); ++m) {
    const bool runs = prediction.loads[m].tokens > 0;
    prediction.seconds.push_back(
        runs ? predicted_seconds(costs.time, prediction.loads[m], memory.checkpoint_activations) : 0);
    if (!runs) prediction.peak_bytes[m] = 0;
    if (runs && logprob_pass) {
      prediction.logprob_pass_seconds += predicted_forward_seconds(costs.time, prediction.loads[m]);
    }
  }
  return prediction;
}

double StepPrediction::total_seconds() const {
  return std::accumulate(seconds.begin(), seconds.end(), logprob_pass_seconds);
}

double StepPrediction::largest_peak_bytes() const {
  return peak_bytes.empty() ? 0 : *std::max_element(peak_bytes.begin(), peak_bytes.end());
}

double StepMeasures::measured_seconds() const {
  double seconds = logprob_pass ? logprob_pass->seconds : 0;
  for (const MicroBatchMeasure& measure : measured) seconds += measure.seconds;
  return seconds;
}

int64_t StepMeasures::measured_peak_bytes() const {
  int64_t bytes = logprob_pass ? logprob_pass->peak_bytes : 0;
  for (const MicroBatchMeasure& measure : measured) bytes = std::max(bytes, measure.peak_bytes);
  return bytes;
}

}  // namespace espalier
