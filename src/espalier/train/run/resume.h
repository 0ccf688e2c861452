// SPDX-License-Identifier: Apache-2.0
// Resumes a training run from its newest intact checkpoint.
#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "espalier/model/decoder.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/optimizer/optimizer.h"
#include "espalier/train/run/run_state.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// The run as it is now, to compare with its checkpoints.
struct RunNow {
  const TrainOptions& options;
  const SourceModel& source;
  const RunState& state;
};

/// Throws InputError if options.out or options.rescue_dir contains a run and options do not ask to resume it.
void check_not_begun(const TrainOptions& options);

/// Hash (content_hashes) of a column of the rows that checkpoints of a run were trained on; "" if there
/// are no checkpoints or they have no hashes.
std::string trained_column_hash(const std::filesystem::path& run_folder, const std::string& column);

/// Loads decoder and optimiser from a checkpoint of options.out or options.rescue_dir and returns its folder;
/// empty for a new run. Uses the newest checkpoint that matches its manifest and is finite; newer ones are
/// renamed to step_N.damaged and their faults are reported to `note`. Throws InputError if options.out
/// contains a run that is not to be resumed, no checkpoint is usable, the newest one has a newer format, or
/// flags, model or data differ from those of the run.
std::filesystem::path resume(const RunNow& now, Decoder* decoder, Optimizer* optimizer,
                             const std::function<void(const std::string&)>& note);

/// Throws InputError unless a run whose state before the first step is `now` repeats the one that began with
/// `saved`: names the first difference of model, settings, data or held-out data.
void check_repeats(const RunState& saved, const RunState& now, const TrainOptions& options);

/// A key of config.json that differs, with both values as JSON.
struct ConfigDifference {
  std::string key, before, now;
};
/// The first difference that affects what the model computes; nullopt if there is none.
std::optional<ConfigDifference> config_difference(const nlohmann::ordered_json& saved,
                                                  const nlohmann::ordered_json& now);

}  // namespace espalier
