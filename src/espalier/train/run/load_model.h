// SPDX-License-Identifier: Apache-2.0
// The model of a run.
#pragma once

#include "espalier/model/decoder.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// The decoder of options.model, and where options ask for one with an adapter: a new one or that of a
/// folder. Throws InputError where either cannot be loaded, targets are no linear maps of the model, or the
/// adapter has dropout.
Decoder load_model(const TrainOptions& options);

}  // namespace espalier
