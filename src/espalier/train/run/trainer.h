// SPDX-License-Identifier: Apache-2.0
// The training loop.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/train/run/epochs.h"
#include "espalier/train/run/evaluation.h"
#include "espalier/train/run/run_folder.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// Callbacks during a run, and files for its folder.
struct TrainEvents {
  /// Written before the first step, and rewritten if they are removed.
  std::vector<RunFile> files{};
  /// Called before the first step.
  std::function<void(int64_t total_steps, int64_t resumed_step)> started;
  std::function<void(int64_t step, int64_t done, int64_t total)> micro_batch;
  std::function<void(int64_t step, const nlohmann::ordered_json& metrics)> step;
  /// Called after the first step if options.predicted_costs is set: predicted and measured micro-batches.
  std::function<void(const Step& step, const StepPrediction& prediction, const StepResult& result)> predicted;
  std::function<void(const std::filesystem::path& folder)> saved;
  /// Reads files of options.follow.
  std::function<Trajectories(const std::vector<std::string>& names)> read;
  /// Called during an evaluation, and with its results; `state` includes them.
  std::function<void(int64_t step, int64_t done, int64_t total)> evaluating;
  std::function<void(int64_t step, const nlohmann::ordered_json& values, const EvaluationState& state)>
      evaluated;
  std::function<void(const std::string& text)> note;
};

/// An error that ended a run after completed steps. The message has the error, what was saved and how to
/// continue.
class RunError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Trains, and writes checkpoints and metrics to options.out, which is locked (base/folder_lock.h). Stops
/// after the current step, with a checkpoint, when *stop becomes true. Returns false if it was stopped before
/// the last step.
///
/// Errors are found before the first step where possible (InputError): options out of range, a step without
/// loss, a model that is not finite, a checkpoint of another run. After an error in a later step, completed
/// steps are saved, unless weights are half updated, and a RunError is thrown. Loss or gradient norm that is
/// not finite is such an error, found before the weights are updated. A checkpoint that cannot be written is
/// retried after later steps; it is an error when the next one is due or the run ends. Until it succeeds, the
/// newest such step is in options.rescue_dir, if set. Failure to write
/// metrics is not an error. If the folder is removed during the run, it is recreated with events.files and
/// later checkpoints (run_folder.h); failure to do so is an error at the end, or at once if another run has
/// locked the folder.
///
/// With options.follow the rows are those of its files, as events.read gives them, and `trajectories` is
/// empty. Checkpoints name the files that were taken, so that a resumed run goes on with the next row.
///
/// With `held_out`, the rows are evaluated by its options, and the evaluation state is part of checkpoints.
/// *stop also interrupts an evaluation, which is then made first on resume. Early stopping ends the run as
/// its last step does.
///
/// A resumed run is bitwise identical to an uninterrupted one with the same flags, data and number of
/// threads, on other devices than the CPU if they are deterministic. A run may be resumed on another device.
bool train(const Trajectories& trajectories, const TrainOptions& options, const TrainEvents& events,
           const std::atomic<bool>* stop = nullptr, const HeldOut* held_out = nullptr);

}  // namespace espalier
