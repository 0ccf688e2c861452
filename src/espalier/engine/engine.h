// SPDX-License-Identifier: Apache-2.0
// Forward and backward of a step on its plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "espalier/engine/batch.h"
#include "espalier/engine/forward.h"
#include "espalier/model/model.h"
#include "espalier/model/router_statistics.h"
#include "espalier/plan/cost_model.h"
#include "espalier/runtime/stopwatch.h"

namespace espalier {

/// What one micro-batch took.
struct MicroBatchMeasure {
  int64_t micro_batch = 0;  // index in the plan
  double seconds = 0;       // forward, backward and recomputation; not its descendants'
  int64_t peak_bytes = 0;   // most bytes of tensors meanwhile, on the model's device; 0 where nothing counts
};

/// A metric of the objective, reduced over the terms of the step.
struct StepMetric {
  std::string name;
  double value = 0;
};

struct StepResult {
  double loss = 0;
  Work work;        // encoded tokens, visible pairs, logit rows
  Work recomputed;  // passed forward through the layers a second time by activation checkpointing
  int64_t flat_tokens = 0;
  int64_t tree_tokens = 0;
  int64_t terms = 0;                              // loss terms over all trajectories
  std::vector<StepMetric> metrics;                // of the objective
  std::optional<RouterReport> routers;            // of a model with experts
  std::vector<MicroBatchMeasure> measured;        // of the micro-batches that ran, in the order of the plan
  std::optional<MicroBatchMeasure> logprob_pass;  // of the pass that computes log-probabilities and routes
                                                  // alone, all micro-batches together; micro_batch is -1

  double measured_seconds() const;  // all of these
  int64_t measured_peak_bytes() const;
};

/// Called after each micro-batch with the number done and the total. Done means handed to the device, which
/// may still be working on it. The micro-batches of a log-prob pass count as well.
using MicroBatchProgress = std::function<void(int64_t done, int64_t total)>;

/// A step whose micro-batches have all been handed to the device.
struct PendingStep {
  /// How the number of a metric becomes its value: a mean is over the terms, or units, of its part of the
  /// loss.
  struct Reduced {
    Reduction reduction = Reduction::kMean;
    int64_t part = 0;
    double scale = 1;
  };
  StepResult result;               // but for loss, values of metrics and seconds
  std::vector<Reduced> reduced;    // of the metrics
  std::vector<int64_t> num_terms;  // of each part of the loss
  std::vector<int64_t> num_units;  // trajectories, groups or pairs with terms, for scopes wider than a token
  at::Tensor sums;  // [1 + metrics] float64 on the device: of the loss, then each metric, reduced
  std::vector<Stopwatch> stopwatches;     // of result.measured
  std::optional<Stopwatch> logprob_pass;  // of result.logprob_pass
  RouterShape routers;                    // of the model
  at::Tensor router_values;               // RouterStatistics::values; undefined without routers
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
