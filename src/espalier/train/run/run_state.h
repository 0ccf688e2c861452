// SPDX-License-Identifier: Apache-2.0
// What a checkpoint says of its run, beside weights and optimiser: trainer_state.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "espalier/data/trajectories.h"
#include "espalier/train/run/run_settings.h"

namespace espalier {

/// How the evaluations of a run on held-out rows have gone.
struct EvaluationState {
  int64_t step = 0;  // of the last one; 0: there was none
  int64_t best_step =
      0;                 // of the one with the lowest finite loss, the first of equal ones; 0: there was none
  double best_loss = 0;  // its loss, where there was one
  int64_t since_best = 0;                               // evaluations since then
  std::map<std::string, std::string> data_hashes = {};  // content_hashes of the rows

  bool operator==(const EvaluationState&) const = default;
};

/// Among the adjustable settings of a run whose learning rate falls to 0 at its last step: their number.
inline constexpr const char* kScheduledSteps = "steps";

struct RunState {
  int64_t step = 0;  // optimiser steps done; at least 1 in a run
  int64_t data_rows = 0;
  int64_t data_tokens = 0;
  std::map<std::string, std::string> data_hashes;  // content_hashes; empty where an older Espalier wrote it
  std::optional<RunSettings> settings;             // none where an older Espalier wrote it
  /// Of a run that trains an adapter, whose checkpoints do not hold the model: config.json of the model, and
  /// hashes of what the run began with, by the flag that names it: `model` (weights_hash), `adapter`.
  nlohmann::ordered_json model_config = {};
  std::map<std::string, std::string> file_hashes = {};
  std::optional<EvaluationState> evaluation = {};  // of a run that evaluates
};

/// The state of a run on `trajectories` after no step.
RunState run_state_of(const Trajectories& trajectories, const TrainOptions& options);

/// The text of trainer_state.json.
std::string to_text(const RunState& state);

/// trainer_state.json of a step folder. Throws InputError where it is missing, is of a format that is not
/// known, holds a value of another type or range, or names another step than the folder.
RunState read_run_state(const std::filesystem::path& checkpoint);

/// The same of a checkpoint in a folder of any name, after no step or more.
RunState read_state_of_any_folder(const std::filesystem::path& checkpoint);

}  // namespace espalier
