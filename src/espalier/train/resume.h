// SPDX-License-Identifier: Apache-2.0
// Continuing a run from its newest checkpoint that is whole.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "espalier/model/decoder.h"
#include "espalier/model/weights.h"
#include "espalier/train/optimizer.h"
#include "espalier/train/run_state.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// What a run is now, to be compared with what it was.
struct RunNow {
  const TrainOptions& options;
  const SourceModel& source;
  const RunState& state;
};

/// Puts decoder and optimiser into the state of a checkpoint of options.out and returns its step; 0 for a new
/// run. The newest checkpoint is taken that its manifest finds whole and that holds finite numbers only;
/// newer ones are renamed to step_N.damaged, and `note` is told what is wrong with them. Throws InputError
/// where options.out holds a run that is not to be resumed, where no checkpoint can be taken, and where
/// flags, model or data are not those of the run.
int64_t resume(const RunNow& now, Decoder* decoder, Optimizer* optimizer,
               const std::function<void(const std::string&)>& note);

}  // namespace espalier
