// SPDX-License-Identifier: Apache-2.0
// Forward and backward of a step on its plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "espalier/engine/batch.h"
#include "espalier/engine/forward.h"
#include "espalier/engine/step_measures.h"
#include "espalier/engine/step_sums.h"
#include "espalier/model/model.h"
#include "espalier/model/router_statistics.h"
#include "espalier/plan/cost_model.h"
#include "espalier/runtime/stopwatch.h"
#include "espalier/runtime/tensor_memory.h"

namespace espalier {

/// Measures passes over a micro-batch, which may be several.
class PassMeter {
 public:
  explicit PassMeter(at::Device device) : device_(device), stopwatch_(device) {}

  /// Adds the time and the peak memory of what `body` does.
  template <class Body>
  void measure(const Body& body) {
    reset_peak_tensor_memory(device_);
    stopwatch_.start();
    body();
    stopwatch_.stop();
    peak_bytes_ = std::max(peak_bytes_, peak_tensor_memory(device_));
  }

  /// As of Stopwatch::seconds.
  MicroBatchMeasure read(int64_t micro_batch) const {
    return {micro_batch, stopwatch_.seconds(), peak_bytes_};
  }

 private:
  at::Device device_;
  Stopwatch stopwatch_;
  int64_t peak_bytes_ = 0;
};

/// What a step is known to do without its device.
struct StepCounts {
  /// Before anything has run.
  explicit StepCounts(const Step& step)
      : flat_tokens(step.flat_tokens()), tree_tokens(step.forest.tree_tokens()) {}
  StepCounts() = default;

  Work work;        // encoded tokens, visible pairs, logit rows
  Work recomputed;  // passed forward through the layers a second time by activation checkpointing
  int64_t flat_tokens = 0;
  int64_t tree_tokens = 0;
  int64_t terms = 0;  // loss terms over all trajectories
};

struct StepResult : StepCounts, StepMeasures {
  double loss = 0;
  std::vector<StepMetric> metrics{};      // of the objective
  std::optional<RouterReport> routers{};  // of a model with experts
};

/// Called after each micro-batch with the number done and the total. Done means handed to the device, which
/// may still be working on it. The micro-batches of a log-prob pass count as well.
using MicroBatchProgress = std::function<void(int64_t done, int64_t total)>;

/// A step whose micro-batches have all been handed to the device. The loss must outlive it.
struct PendingStep {
  struct Routers {
    RouterShape shape;
    at::Tensor values;  // RouterStatistics::values
  };
  StepCounts counts;
  StepSums sums;
  std::map<int64_t, PassMeter> meters;    // of the micro-batches that ran
  std::optional<PassMeter> logprob_pass;  // where there was one
  std::optional<Routers> routers;         // of a model with experts
};

/// Adds the gradients of the step's loss to the model's (Model::gradients). Micro-batches without loss in
/// them or below do not run. Those with descendants keep their activations (or context alone:
/// CheckpointActivations::kPiece) until the descendants are done. Losses of a scope wider than a token are
/// evaluated when all log-probabilities that they depend on are known (unit_loss.h); where the order of the
/// plan does not give them in time, a pass that computes log-probabilities alone runs first; likewise for the
/// load-balancing loss of routers, which depends on how many tokens of the step each expert has. With losses
/// of routers all micro-batches run. The host never waits for the model's device, except that a mixture of
/// experts reads the numbers of its tokens: so it always has work.
PendingStep start_forward_backward(const Model& model, const Step& step, const Loss& loss,
                                   const MicroBatchProgress& progress = {});

/// Waits for the device, once, and reads what it has computed beside the gradients.
StepResult finish(PendingStep pending);

/// Both.
StepResult forward_backward(const Model& model, const Step& step, const Loss& loss,
                            const MicroBatchProgress& progress = {});

/// Log-probabilities of every term of the step given all tokens before it, aligned to the data's tokens (flat
/// index offsets[row] + position); other entries are left as they are.
void compute_logprobs(const Model& model, const Trajectories& trajectories, const Step& step,
                      std::vector<double>* logprobs, const MicroBatchProgress& progress = {});

}  // namespace espalier
