// SPDX-License-Identifier: Apache-2.0
// Loss and metrics of a step without gradients.
#pragma once

#include "espalier/engine/engine.h"

namespace espalier {

/// What forward_backward computes of the step beside gradients, by one forward pass over the trees: loss,
/// metrics, and the numbers of tokens and terms. Of the work it gives the encoded tokens alone, and nothing
/// of routers and measures. One metric is added: `nll_per_token`, the negative log-likelihood of the terms,
/// averaged by their loss weights over all trajectories, whatever the objective and its normaliser. The same
/// bits for the same weights, step and number of threads. Waits for the device.
StepResult evaluate(const Model& model, const Step& step, const Loss& loss,
                    const MicroBatchProgress& progress = {});

}  // namespace espalier
