// Forward and backward of a step on its plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "espalier/model/decoder.h"
#include "espalier/plan/cost_model.h"
#include "espalier/train/batch.h"
#include "espalier/train/forward.h"
#include "espalier/train/stopwatch.h"

namespace espalier {

/// What one micro-batch took.
struct MicroBatchMeasure {
  int64_t micro_batch = 0;  // index in the plan
  double seconds = 0;       // forward, backward and recomputation; not its descendants'
  int64_t peak_bytes = 0;  // most bytes of tensors meanwhile, on the decoder's device; 0 where nothing counts
};

struct StepResult {
  double loss = 0;
  Work work;        // encoded tokens, visible pairs, head rows
  Work recomputed;  // passed forward through the layers a second time by activation checkpointing
  int64_t flat_tokens = 0;
  int64_t tree_tokens = 0;
  int64_t terms = 0;  // loss terms over all trajectories
  int64_t clipped_terms = 0;
  double ratio_sum = 0;
  double mismatch_kl_sum = 0;
  std::vector<MicroBatchMeasure> measured;  // of the micro-batches that ran, in the order of the plan

  double measured_seconds() const;
  int64_t measured_peak_bytes() const;
};

/// Called after each micro-batch with how many are done of how many: handed to the device, which may still be
/// at it.
using MicroBatchProgress = std::function<void(int64_t done, int64_t total)>;

/// A step whose micro-batches have all been handed to the device.
struct PendingStep {
  StepResult result;  // but for loss, objective statistics and seconds
  at::Tensor sums;    // [4] float64 on the device: of loss, clipped_terms, ratio_sum, mismatch_kl_sum
  std::vector<Stopwatch> stopwatches;  // of result.measured
};

/// Adds the gradients of the step's loss to the decoder's (Decoder::gradients). Micro-batches without loss in
/// them or below do not run. Those with descendants keep their activations (or context alone:
/// CheckpointActivations::kPiece) until the descendants are done. The host never waits for the decoder's
/// device: nothing is read from it, so that it always has work.
PendingStep start_forward_backward(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                                   const ObjectiveOptions& objective, const Advantages* advantages,
                                   const MicroBatchProgress& progress = {});

/// Waits for the device, once, and reads what it has computed beside the gradients.
StepResult finish(PendingStep pending);

/// Both.
StepResult forward_backward(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                            const ObjectiveOptions& objective, const Advantages* advantages,
                            const MicroBatchProgress& progress = {});

/// Log-probabilities of every token of the step's rows given all before it, aligned to the data's tokens
/// (flat index offsets[row] + position); entries of first tokens and of other rows are left as they are.
void compute_logprobs(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                      std::vector<double>* logprobs, const MicroBatchProgress& progress = {});

}  // namespace espalier
