// SPDX-License-Identifier: Apache-2.0
// Continuing a run from its newest checkpoint that is whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/model/decoder.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/optimizer/optimizer.h"
#include "espalier/train/run/run_state.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// What a run is now, to be compared with what it was.
struct RunNow {
  const TrainOptions& options;
  const SourceModel& source;
  const RunState& state;
};

/// Throws InputError where options.out holds a run and it is not to be resumed.
void check_not_begun(const TrainOptions& options);

/// Hash (data/content_hash.h) of a column of the rows that the checkpoints of a run were trained on; "" where
/// there are none, or an older Espalier wrote them.
std::string trained_column_hash(const std::filesystem::path& run_folder, const std::string& column);

/// Puts decoder and optimiser into the state of a checkpoint of options.out and returns its step; 0 for a new
/// run. The newest checkpoint is taken that its manifest finds whole and that holds finite numbers only;
/// newer ones are renamed to step_N.damaged, and `note` is told what is wrong with them. Throws InputError
/// where options.out holds a run that is not to be resumed, where no checkpoint can be taken, and where
/// flags, model or data are not those of the run.
int64_t resume(const RunNow& now, Decoder* decoder, Optimizer* optimizer,
               const std::function<void(const std::string&)>& note);

/// A key of config.json that is not the same, with its values as JSON.
struct ConfigDifference {
  std::string key, before, now;
};
/// The first one that decides what the model computes; nothing where there is none.
std::optional<ConfigDifference> config_difference(const nlohmann::ordered_json& saved,
                                                  const nlohmann::ordered_json& now);

/// What is wrong with a checkpoint by its manifest, whose title is `name`; "" when nothing is. `note` is told
/// of what is odd.
std::string manifest_fault(const std::filesystem::path& folder, const std::string& name,
                           const std::function<void(const std::string&)>& note);

}  // namespace espalier
