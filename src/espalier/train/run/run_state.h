// SPDX-License-Identifier: Apache-2.0
// trainer_state.json: the state of a training run beside weights and optimiser, and its settings.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/data/trajectories.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// Values by option name. Options in neither object may change freely: file locations, device, number of
/// steps, checkpoint interval; also cost model and matrix products, which a run reads from its own
/// cost_model.json.
struct RunSettings {
  nlohmann::ordered_json fixed = nlohmann::ordered_json::object();       // must not change
  nlohmann::ordered_json adjustable = nlohmann::ordered_json::object();  // may change, with a note

  bool operator==(const RunSettings&) const = default;
};

RunSettings run_settings(const TrainOptions& options);

/// State of the evaluations of a run.
struct EvaluationState {
  int64_t step = 0;        // of the last evaluation; 0: none
  int64_t best_step = 0;   // of the evaluation with the lowest finite loss, the first of equal ones; 0: none
  double best_loss = 0;    // its loss
  int64_t since_best = 0;  // evaluations since the best
  std::map<std::string, std::string> data_hashes = {};  // content_hashes of the held-out rows

  bool operator==(const EvaluationState&) const = default;
};

/// The adjustable setting with the number of steps, if the learning rate falls to 0 at the last one.
inline constexpr const char* kScheduledSteps = "steps";

/// The files of --follow that a run has taken. `newest`: those with the rows of the steps first_step + 1 to
/// last_step.
struct TakenFiles {
  std::set<std::string> names{};
  std::vector<std::string> newest{};
  int64_t first_step = 0, last_step = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TakenFiles, names, newest, first_step, last_step)

struct RunState {
  int64_t step = 0;           // optimiser steps done; at least 1 in a run
  int64_t skipped_steps = 0;  // of these, the steps whose update was left out (skip_bad_steps)
  int64_t data_rows = 0;
  int64_t data_tokens = 0;
  std::map<std::string, std::string> data_hashes;  // content_hashes; empty if written by an older Espalier
  std::optional<RunSettings> settings;             // nullopt if written by an older Espalier
  /// config.json of the model, and hashes of the files that the run started from, by flag: `model`
  /// (weights_hash), `adapter`. In checkpoints only if an adapter is trained, because they do not contain the
  /// model then.
  nlohmann::ordered_json model_config = {};
  std::map<std::string, std::string> file_hashes = {};
  std::optional<EvaluationState> evaluation = {};  // if the run evaluates
  std::optional<TakenFiles> taken = {};            // if it follows a folder; data_* are of the newest files
};

/// The state of a run on `trajectories` before the first step.
RunState run_state_of(const Trajectories& trajectories, const TrainOptions& options);

/// Sets model_config and file_hashes.
void add_source(const TrainOptions& options, RunState* state);

/// The content of trainer_state.json.
nlohmann::ordered_json to_json(const RunState& state);

/// A state from the content of `file`. Throws as read_run_state does.
RunState state_from_json(const nlohmann::ordered_json& json, const std::string& file);

/// Thrown for a state of a newer format.
class NewerFormatError : public InputError {
 public:
  using InputError::InputError;
};

/// Reads trainer_state.json of a step folder, of this format or an older one. Throws NewerFormatError for a
/// newer one, InputError if it is missing, has a value of the wrong type or range, or names another step than
/// the folder.
RunState read_run_state(const std::filesystem::path& checkpoint);

/// The same for a folder of any name; step 0 is allowed.
RunState read_state_of_any_folder(const std::filesystem::path& checkpoint);

}  // namespace espalier
