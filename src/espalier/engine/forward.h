// SPDX-License-Identifier: Apache-2.0
// The forward pass of one micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "espalier/engine/batch.h"
#include "espalier/engine/context_frame.h"
#include "espalier/model/model.h"

namespace espalier {

/// Whether entropies are computed, and whether they are in the graph.
enum class Entropies { kNone, kDetached, kDifferentiable };

struct ForwardOptions {
  bool keep_context = false;                                 // return the context for descendants
  bool checkpoint_layers = false;                            // save only the inputs of layers (recompute.h)
  bool head = true;                                          // compute log-probabilities
  Entropies entropies = Entropies::kNone;                    // compute entropies; log-probabilities are
                                                             // unaffected by kDetached
  c10::intrusive_ptr<RouterStatistics> router_statistics{};  // null: none
  RouterRecord* router_record = nullptr;                     // if set, appended to
};

struct ForwardResult {
  at::Tensor logprobs;                // [E] of the batch's edges, float32 (float64 for float64 models)
  at::Tensor entropy;                 // likewise, if requested
  at::Tensor hidden;                  // [T, hidden_size] of the last layer, if routers have losses
  std::vector<LayerContext> context;  // by layer, in the graph; empty unless kept
};

/// `ancestors`: the frames of batch.ancestors, in that order; they must outlive the backward pass.
ForwardResult forward(const Model& model, const Batch& batch, std::span<ContextFrame* const> ancestors,
                      const ForwardOptions& options);

}  // namespace espalier
