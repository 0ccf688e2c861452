// Predicted FLOPs and memory of a step.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "espalier/model/config.h"
#include "espalier/plan/cost_model.h"
#include "espalier/train/batch.h"
#include "espalier/train/optimizer.h"

namespace espalier {

ModelShape model_shape(const DecoderConfig& config);

/// Work of each micro-batch of the step's plan; nothing where no loss is in it or below.
std::vector<Work> micro_batch_work(const Step& step);

/// Work of the step's plan; of the same trajectories with nothing shared; and after append-only merging (see
/// ForestStatistics), where a merged trajectory's loss is computed in one that extends it. Head rows are
/// counted per micro-batch (plan) and per sequence (flat, append-only).
Work plan_work(const Step& step);
Work flat_work(const Step& step);
Work append_only_work(const Step& step);

/// FLOPs(flat) / FLOPs(plan): no speed-up over sequence packing can be larger.
double speedup_bound(const ModelShape& shape, const Step& step);

struct MemoryEstimate {
  double weights = 0;      // bytes; all of them
  double gradients = 0;    // sums, and one micro-batch's gradients in the model's dtype
  double optimizer = 0;    // state and master weights
  double activations = 0;  // kept for backward by the largest micro-batch, its logits chunk included
  double total() const { return weights + gradients + optimizer + activations; }
};

/// Peak bytes of training with micro-batches of at most max_tokens tokens.
MemoryEstimate estimate_memory(const DecoderConfig& config, at::ScalarType dtype, OptimizerKind optimizer,
                               int64_t max_tokens);

}  // namespace espalier
