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

/// What a caller sees of a run while it goes on, and adds to its folder.
struct TrainEvents {
  /// Written before the first step, and again where they are removed later.
  std::vector<RunFile> files{};
  /// Before the first step: total steps and the step resumed from.
  std::function<void(int64_t total_steps, int64_t resumed_step)> started;
  std::function<void(int64_t step, int64_t done, int64_t total)> micro_batch;
  std::function<void(int64_t step, const nlohmann::ordered_json& metrics)> step;
  /// After the first step, with predicted_costs: what was predicted of its micro-batches and what was
  /// measured.
  std::function<void(const Step& step, const StepPrediction& prediction, const StepResult& result)> predicted;
  std::function<void(const std::filesystem::path& folder)> saved;
  /// While the held-out rows are evaluated after a step, and then what came of it: `state` has it already.
  std::function<void(int64_t step, int64_t done, int64_t total)> evaluating;
  std::function<void(int64_t step, const nlohmann::ordered_json& values, const EvaluationState& state)>
      evaluated;
  std::function<void(const std::string& text)> note;
};

/// An error that ended a run after steps had been done. The message says the error, what was saved and how to
/// go on.
class RunError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Trains and writes checkpoints and metrics to options.out, which is locked meanwhile (base/folder_lock.h).
/// Stops after the current step, with a checkpoint, when *stop becomes true. Returns false if it was stopped
/// before the last step.
///
/// Everything that can be checked before the first step is checked then (InputError): options out of range, a
/// step without loss, a model that is not finite, a checkpoint of another run. An error in a later step
/// saves the steps that are done, unless their weights are half updated, and becomes a RunError. Loss or
/// gradient norm that is not finite is such an error, and is found before the weights are updated. A
/// checkpoint that cannot be written is tried again after later steps; when the next one is due, or the run
/// ends, it is an error. Metrics that cannot be written are not an error. A folder that is removed while the
/// run goes on is made again with events.files and the checkpoints that are still to come (run_folder.h);
/// where that cannot be done it is an error at the end, and at once where another run has the folder.
///
/// With `held_out` the rows are evaluated as its options say, and their state is part of checkpoints.
/// *stop ends an evaluation as well; the run that continues makes it first. A run that ends early ends as
/// after its last step.
///
/// A resumed run continues bit for bit: same flags, same data, same number of threads; on a device other than
/// the CPU, where that is deterministic. Another device may continue it.
bool train(const Trajectories& trajectories, const TrainOptions& options, const TrainEvents& events,
           const std::atomic<bool>* stop = nullptr, const HeldOut* held_out = nullptr);

}  // namespace espalier
