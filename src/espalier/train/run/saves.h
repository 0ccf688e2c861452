// SPDX-License-Identifier: Apache-2.0
// What a training run saves: checkpoints when they are due, with retries and a rescue folder, the best one,
// and published weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "espalier/train/optimizer/step_trainer.h"
#include "espalier/train/run/checkpoint.h"
#include "espalier/train/run/run_folder.h"
#include "espalier/train/run/trainer.h"

namespace espalier {

/// Schedule of checkpoints, with retries of those that could not be written.
class SaveSchedule {
 public:
  SaveSchedule(int64_t every, int64_t last) : every_(every), last_(last) {}

  bool is_due(int64_t step, bool stopping) const {
    return is_final(step, stopping) || is_regular(step) || step == retry_at_;
  }
  void saved() { failures_ = retry_at_ = 0; }

  /// Whether the run, which has completed step `now`, may continue although the checkpoint of `step` could
  /// not be written: until the next one is due, with retries after 1, 2, 4, ... steps.
  bool may_wait(int64_t step, int64_t now, bool stopping) {
    if (is_final(step, stopping) || (failures_ > 0 && is_regular(step))) return false;
    retry_at_ = now + (int64_t{1} << std::min<int64_t>(failures_++, 20));
    return true;
  }

 private:
  bool is_final(int64_t step, bool stopping) const { return step == last_ || stopping; }
  bool is_regular(int64_t step) const { return every_ > 0 && step % every_ == 0; }

  int64_t every_, last_;
  int64_t failures_ = 0;  // consecutive
  int64_t retry_at_ = 0;
};

/// A run as it is saved; what it refers to outlives the Saves.
struct RunToSave {
  const TrainOptions& options;
  const TrainEvents& events;
  const StepTrainer& trainer;
  const RunState& state;  // state.step: the last completed step
  CheckpointOptions checkpoint;
  RunFolder* rescue_folder;  // null: none, or not the first rank
  int64_t last;              // step
};

/// Collectives but for publish() and getters: all ranks have the same Saves and write checkpoints together
/// (CheckpointWriter). Warnings and saved checkpoints are told to run.events.
class Saves {
 public:
  /// `resumed`: the checkpoint that the run continues; empty: none.
  Saves(RunToSave run, const std::filesystem::path& resumed);

  /// The step of the newest checkpoint in the run's folder; 0: none.
  int64_t saved() const { return saved_; }

  /// Saves the last completed step in the run's folder if it was resumed from the rescue folder.
  void bring_back();

  /// Takes the result of a checkpoint that was written in the background, and saves the last completed step
  /// if it is due. `ends`: the run ends here. Throws if there is no retry.
  void after_step(bool ends);

  /// Saves the last completed step. Throws if it cannot be written, else returns true.
  bool save_now() {
    write(checkpoint_folder(options_.out, run_.state.step));
    return add_saved(run_.state.step);
  }

  /// Writes the checkpoint of the last completed step again, with the present state of the run.
  void replace() { write(checkpoint_folder(options_.out, run_.state.step), /*replaces=*/true); }

  /// Returns false, with a warning, if the best checkpoint cannot be written.
  bool save_best();
  /// Why the best checkpoint could not be written, as a sentence; "": it could.
  std::string best_failure() const;

  /// Publishes the weights where it is time. Failure does not end the run. The first rank calls it.
  void publish() const;

  /// After files of the folder were removed: forgets checkpoints that are gone. Returns whether the best one
  /// was lost, that of `best_step` (0: there was none).
  bool forget_lost(int64_t best_step);
  /// The folder cannot be written any more.
  void give_up() { save_failed_ = true; }

  /// After an error: saves the completed steps if possible. Returns what was saved and how to continue.
  std::string end_after_error();

 private:
  template <class Save>
  void try_to_save(int64_t step, bool stop, const Save& save);
  std::unique_ptr<CheckpointWriter> begin(const std::filesystem::path& folder);
  void write(const std::filesystem::path& folder, bool replaces = false);
  bool add_saved(int64_t step);
  void save(bool stop);
  bool start_in_background();
  void finish_writing(bool stop);
  void try_to_rescue();
  void forget_rescued(int64_t before);
  std::string save_at_the_end();
  std::string newest_checkpoint_text() const;
  void note(const std::string& text) const {
    if (run_.events.note) run_.events.note(text);
  }

  const RunToSave run_;
  const TrainOptions& options_;
  const Group& group_;
  SaveSchedule schedule_;
  std::unique_ptr<CheckpointWriter> writing_;  // in the background
  int64_t saved_ = 0;                          // step of the newest checkpoint
  int64_t rescued_ = 0;                        // step of the checkpoint in the rescue folder; 0: none
  bool save_failed_ = false;                   // the exception came from writing a checkpoint
  bool needs_rescue_ = false;                  // a step could not be saved
  bool is_noted_ = false;                      // that the first rank writes all
  std::string best_error_;                     // why the best checkpoint could not be written; "": no error
  int64_t best_failed_step_ = 0;
};

}  // namespace espalier
