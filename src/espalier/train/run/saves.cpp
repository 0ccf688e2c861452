// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/saves.h"

#include <cstdlib>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/runtime/out_of_memory.h"

namespace espalier {

Saves::Saves(RunToSave run, const std::filesystem::path& resumed)
    : run_(std::move(run)),
      options_(run_.options),
      group_(*options_.group),
      schedule_(options_.save_every, run_.last) {
  if (resumed.empty()) return;
  const int64_t step = step_of(resumed);
  (resumed == checkpoint_folder(options_.out, step) ? saved_ : rescued_) = step;
}

/// Calls `save` on the first rank, with the optimiser state of all ranks. All ranks throw what it throws.
template <class Save>
void Saves::save_on_first(const Save& save) {
  OptimizerState optimizer = run_.trainer.optimizer().state();
  group_.together([&] {
    if (!group_.is_first()) return true;
    save(optimizer);
    try_to_rescue(optimizer);
    return true;
  });
}

/// Calls `save`, which saves `step`. A failure is retried later, or thrown.
template <class Save>
void Saves::try_to_save(int64_t step, bool stop, const Save& save) {
  try {
    save();
    schedule_.saved();
  } catch (const std::exception& error) {
    // Retrying does not make values finite.
    const bool hopeless = dynamic_cast<const NonFiniteError*>(&error) != nullptr;
    if (hopeless || !schedule_.may_wait(step, run_.state.step, stop && step == run_.state.step)) {
      save_failed_ = true;
      throw;
    }
    note(fmt::format("warning: step {} could not be saved: {}; the run continues and retries later", step,
                     text_of(error)));
    needs_rescue_ = true;
  }
}

void Saves::bring_back() {
  if (rescued_ == 0) return;
  save_on_first([&](const OptimizerState& optimizer) {
    try_to_save(run_.state.step, /*stop=*/false, [&] { save_first(optimizer); });
  });
}

void Saves::after_step(bool ends) {
  bool saves = false;
  group_.together([&] {
    if (!group_.is_first()) return true;
    if (writing_.is_done()) finish_writing(ends);
    saves = needs_rescue_ || schedule_.is_due(run_.state.step, ends);
    return true;
  });
  if (!group_.any(saves)) return;
  save_on_first([&](OptimizerState& optimizer) {
    if (schedule_.is_due(run_.state.step, ends)) save(ends, &optimizer);
  });
}

void Saves::save_now() {
  save_on_first([&](const OptimizerState& optimizer) { save_first(optimizer); });
}

void Saves::save_first(const OptimizerState& optimizer) {
  add_saved(save_checkpoint(run_.checkpoint, run_.trainer.decoder(), optimizer, run_.state));
}

void Saves::replace() {
  save_on_first([&](const OptimizerState& optimizer) {
    replace_checkpoint(checkpoint_folder(options_.out, run_.state.step), run_.checkpoint,
                       run_.trainer.decoder(), optimizer, run_.state);
  });
}

void Saves::add_saved(const std::filesystem::path& folder) {
  saved_ = step_of(folder);
  needs_rescue_ = false;
  if (run_.events.saved) run_.events.saved(folder);
  try {
    forget_rescued(/*before=*/saved_ + 1);
    remove_old_checkpoints(options_.out, options_.keep_last, options_.keep_every);
  } catch (const std::exception& error) {
    note(fmt::format("warning: an old checkpoint could not be removed: {}", error.what()));
  }
}

/// Saves a step that is due; a failure may be retried later.
void Saves::save(bool stop, OptimizerState* optimizer) {
  if (writing_.is_pending()) finish_writing(stop);
  const bool waits = !options_.save_in_background || stop || run_.state.step >= run_.last;
  if (!waits && start_writing(optimizer)) return;
  try_to_save(run_.state.step, stop, [&] { save_first(*optimizer); });
}

/// Returns false if there is no memory for a copy.
bool Saves::start_writing(OptimizerState* optimizer) {
  try {
    writing_.start(run_.checkpoint, run_.trainer.decoder(), optimizer, run_.state);
    return true;
  } catch (const std::exception& error) {
    note(fmt::format("warning: step {} is not saved in the background: {}", run_.state.step, text_of(error)));
    return false;
  }
}

/// Waits for the checkpoint that is being written.
void Saves::finish_writing(bool stop) {
  try_to_save(writing_.step(), stop, [&] { add_saved(writing_.finish()); });
}

bool Saves::save_best() {
  save_on_first([&](const OptimizerState& optimizer) {
    try {
      replace_checkpoint(best_checkpoint_folder(options_.out), run_.checkpoint, run_.trainer.decoder(),
                         optimizer, run_.state);
      best_error_.clear();
    } catch (const std::exception& error) {
      best_error_ = text_of(error);
      best_failed_step_ = run_.state.step;
      note(fmt::format(
          "warning: the best checkpoint, that of step {}, could not be saved: {}; the run continues",
          run_.state.step, best_error_));
    }
  });
  return !group_.any(!best_error_.empty());
}

std::string Saves::best_failure() const {
  if (best_error_.empty()) return "";
  return fmt::format("the best checkpoint, that of step {}, could not be saved: {}", best_failed_step_,
                     best_error_);
}

bool Saves::forget_lost(int64_t best_step) {
  if (!std::filesystem::exists(checkpoint_folder(options_.out, saved_))) saved_ = 0;
  if (best_step == 0 || std::filesystem::exists(best_checkpoint_folder(options_.out))) return false;
  best_error_ = "it was removed during the run";
  best_failed_step_ = best_step;
  return true;
}

/// Writes the last completed step, if one could not be saved, to the rescue folder in place of an older one.
void Saves::try_to_rescue(const OptimizerState& optimizer) {
  if (!std::exchange(needs_rescue_, false) || options_.rescue_dir.empty() || rescued_ == run_.state.step)
    return;
  CheckpointOptions elsewhere = run_.checkpoint;
  elsewhere.run_folder = options_.rescue_dir;
  try {
    run_.rescue_folder->restore();
    const auto folder = save_checkpoint(elsewhere, run_.trainer.decoder(), optimizer, run_.state);
    forget_rescued(/*before=*/run_.state.step);
    rescued_ = run_.state.step;
    note(fmt::format("saved {} instead", folder.string()));
  } catch (const std::exception& error) {
    note(fmt::format("warning: step {} could not be saved in --rescue-dir either: {}", run_.state.step,
                     text_of(error)));
  }
}

/// Removes checkpoints of steps before `before` from the rescue folder.
void Saves::forget_rescued(int64_t before) {
  rescued_ = 0;
  if (options_.rescue_dir.empty()) return;
  std::error_code ignored;
  for (const auto& folder : checkpoints(options_.rescue_dir)) {
    if (step_of(folder) < before) std::filesystem::remove_all(folder, ignored);
  }
}

void Saves::publish() const {
  const int64_t step = run_.state.step;
  const bool is_due = step % options_.publish_every == 0 || step == run_.last;
  if (options_.publish.empty() || !is_due) return;
  try {
    const auto folder = publish_weights(options_.publish, run_.checkpoint, run_.trainer.decoder(), step);
    const std::string command = fmt::format("{} '{}'", options_.publish_command, folder.string());
    const int status = options_.publish_command.empty() ? 0 : std::system(command.c_str());
    ESPALIER_CHECK(status == 0, "--publish-command: {} has ended with status {}", command, status);
    note("published " + folder.string());
  } catch (const std::exception& error) {
    note(fmt::format("warning: step {} could not be published: {}; the run continues", step, text_of(error)));
  }
}

std::string Saves::end_after_error() {
  if (writing_.is_pending()) {
    try {
      add_saved(writing_.finish());
    } catch (const std::exception& error) {
      note(fmt::format("warning: step {} could not be saved: {}", writing_.step(), text_of(error)));
    }
  }
  const std::string outcome =
      run_.trainer.is_half_updated()
          ? fmt::format("the update of step {} was not finished, so that its weights are not saved",
                        run_.state.step + 1)
          : save_at_the_end();
  return outcome + (outcome.empty() ? "" : "; ") + newest_checkpoint_text();
}

/// Saves the last completed step, in the rescue folder if need be. Returns why it could not be saved.
std::string Saves::save_at_the_end() {
  const int64_t step = run_.state.step;
  std::string why = save_failed_ ? fmt::format("step {} is not saved", step) : std::string();
  OptimizerState optimizer;
  try {
    group_.check_equal("the step that is saved", std::to_string(step));
    optimizer = run_.trainer.optimizer().state();
    if (group_.is_first() && !save_failed_ && saved_ < step) save_first(optimizer);
  } catch (const std::exception& error) {
    why = fmt::format("step {} could not be saved: {}", step, text_of(error));
  }
  needs_rescue_ = !optimizer.empty() && saved_ < step;
  try_to_rescue(optimizer);
  return why;
}

std::string Saves::newest_checkpoint_text() const {
  if (rescued_ > saved_) {
    return fmt::format("step {} is in {}: continue with --resume and the same --rescue-dir", rescued_,
                       checkpoint_folder(options_.rescue_dir, rescued_).string());
  }
  if (saved_ == 0) return "no checkpoint was written";
  return fmt::format("saved {}, continue with --resume", checkpoint_folder(options_.out, saved_).string());
}

}  // namespace espalier
