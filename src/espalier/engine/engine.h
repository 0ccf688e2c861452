// SPDX-License-Identifier: Apache-2.0
// Forward and backward passes of a step, and its evaluation without gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "espalier/distributed/group.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/forward.h"
#include "espalier/engine/step_cost.h"
#include "espalier/engine/step_sums.h"
#include "espalier/model/model.h"
#include "espalier/model/router_statistics.h"
#include "espalier/plan/cost_model.h"
#include "espalier/runtime/stopwatch.h"
#include "espalier/runtime/tensor_memory.h"

namespace espalier {

/// Accumulates time and peak memory over the passes of a micro-batch.
class PassMeter {
 public:
  explicit PassMeter(at::Device device) : device_(device), stopwatch_(device) {}

  /// Runs `body` and adds its time and peak memory.
  template <class Body>
  void measure(const Body& body) {
    reset_peak_tensor_memory(device_);
    stopwatch_.start();
    body();
    stopwatch_.stop();
    peak_bytes_ = std::max(peak_bytes_, peak_tensor_memory(device_));
  }

  /// See Stopwatch::seconds for when this may be called.
  MicroBatchMeasure read(int64_t micro_batch) const {
    return {micro_batch, stopwatch_.seconds(), peak_bytes_};
  }

 private:
  at::Device device_;
  Stopwatch stopwatch_;
  int64_t peak_bytes_ = 0;
};

/// Counts of a step that are known without reading from the device.
struct StepCounts {
  /// Counts before the first pass.
  explicit StepCounts(const Step& step)
      : flat_tokens(step.whole.flat_tokens), tree_tokens(step.whole.tree_tokens) {}
  StepCounts() = default;

  Work work;        // encoded tokens, visible pairs, logit rows
  Work recomputed;  // work of forward passes repeated by activation checkpointing
  int64_t flat_tokens = 0;
  int64_t tree_tokens = 0;
  int64_t terms = 0;  // loss terms over all trajectories
};

struct StepResult : StepCounts, StepMeasures {
  double loss = 0;
  std::vector<StepMetric> metrics{};      // metrics of the objective
  std::optional<RouterReport> routers{};  // if the model has experts
};

/// Called after each micro-batch with the number done and the total, including those of a log-prob pass. Done
/// means queued on the device.
using MicroBatchProgress = std::function<void(int64_t done, int64_t total)>;

/// What the passes of a step call while they go on.
struct PassEvents {
  MicroBatchProgress progress{};
  /// Adds up what the routers of all ranks have counted. Called before the first backward pass, where that
  /// needs them (needs_routing_pass).
  std::function<void(const std::vector<at::Tensor>&)> routed{};
  /// Called in the last backward pass of the step, for layers from the last to the second: the gradients of
  /// their parameters are those of the step.
  std::function<void(int64_t layer)> left{};
};

/// A step whose micro-batches have all been queued on the device. The loss must outlive it.
struct PendingStep {
  struct Routers {
    RouterShape shape;
    c10::intrusive_ptr<RouterStatistics> statistics;
    bool has_all = false;  // of all ranks
  };
  StepCounts counts;
  StepSums sums;
  std::map<int64_t, PassMeter> meters;    // micro-batches that ran
  std::optional<PassMeter> logprob_pass;  // if there was one
  std::optional<Routers> routers;         // if the model has experts
};

/// Accumulates the gradients of the step's loss in the model's (Model::gradients). Micro-batches without loss
/// in themselves or descendants are skipped, unless there are router losses. Micro-batches with descendants
/// keep their activations (with CheckpointActivations::kPiece only their context) until the descendants are
/// done. A loss of wider scope than a token needs all log-probabilities of a unit (unit_loss.h): if the order
/// of the plan does not provide them in time, a log-prob pass runs first. Likewise for the load-balancing
/// loss, which needs the number of tokens of each expert over the step. The host does not synchronise with
/// the device, except that a mixture of experts reads token counts. A rank of a group has the gradients of
/// its share (share.h).
PendingStep start_forward_backward(const Model& model, const Step& step, const Loss& loss,
                                   const PassEvents& events = {});

/// Synchronises with the device once and reads loss and metrics, those of all ranks. Measures are of this
/// rank.
StepResult finish(PendingStep pending, const Group& group = alone());

/// start_forward_backward and finish.
StepResult forward_backward(const Model& model, const Step& step, const Loss& loss,
                            const MicroBatchProgress& progress = {});

/// Writes the log-probability of every term of the step given all tokens before it, with logits divided as
/// those of the loss (Loss::logit_temperature), by flat index
/// offsets[row] + position; other entries are not changed. Several ranks, whose entries are 0 before, divide
/// the micro-batches of the step, the same on all; all get all values, the bits of one process.
void compute_logprobs(const Model& model, const Loss& loss, const Step& step, std::vector<double>* logprobs,
                      const MicroBatchProgress& progress = {}, const Group& group = alone());

/// The same of logits that are not divided.
void compute_logprobs(const Model& model, const Trajectories& trajectories, const Step& step,
                      std::vector<double>* logprobs, const MicroBatchProgress& progress = {},
                      const Group& group = alone());

/// Throws InputError, naming what they are, unless the values [N] of all tokens but first ones are finite.
void check_finite(const Trajectories& trajectories, const std::vector<double>& values,
                  const std::string& what = "log-probability");

/// An evaluation whose forward passes are done, those of this rank's share. The loss must outlive it.
struct PendingEvaluation {
  StepCounts counts;
  StepSums sums;
  double nll = 0, weights = 0;  // of the terms by their loss weights
};

/// What forward_backward computes of the step beside gradients, by one forward pass over the trees: loss,
/// metrics, and the numbers of tokens and terms. Of the work it gives the encoded tokens alone, and nothing
/// of routers and measures. One metric is added: `nll_per_token`, the negative log-likelihood of the terms,
/// averaged by their loss weights over all trajectories, whatever the objective and its normaliser. The same
/// bits for the same weights, step and number of threads. Waits for the device.
PendingEvaluation start_evaluation(const Model& model, const Step& step, const Loss& loss,
                                   const MicroBatchProgress& progress = {});
StepResult finish(PendingEvaluation pending, const Group& group = alone());

}  // namespace espalier
