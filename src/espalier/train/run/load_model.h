// SPDX-License-Identifier: Apache-2.0
// Loads the model of a training run.
#pragma once

#include "espalier/model/decoder.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// The decoder of options.model, optionally with an adapter: a new one or one loaded from a folder. Throws
/// InputError if either cannot be loaded, a target is not a linear map of the model, or the adapter has
/// dropout.
Decoder load_model(const TrainOptions& options);

/// The adapter of the options for a decoder, whose weights are shared and frozen. Throws likewise.
Decoder with_adapter(const Decoder& decoder, const TrainOptions& options);

}  // namespace espalier
