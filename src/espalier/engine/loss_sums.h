// SPDX-License-Identifier: Apache-2.0
// What the losses and metrics of micro-batches sum up to, while a step runs.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/engine/engine.h"

namespace espalier {

/// Sets sums, metrics and numbers of tokens to those of a step of which nothing has run.
void begin_sums(const Model& model, const Step& step, const Loss& loss, PendingStep* pending);

void add_to_sums(const ObjectiveValue& value, PendingStep* pending);

/// Whether entropies have a part in the loss.
bool has_entropy_bonus(const Loss& loss);

/// What the entropies [E] of the edges of a batch add to the loss. Adds it and the metric to the sums.
at::Tensor add_entropy_bonus(const Loss& loss, const Batch& batch, const at::Tensor& of_edges,
                             PendingStep* pending);

}  // namespace espalier
