// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/saves.h"

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

std::unique_ptr<CheckpointWriter> Saves::begin(const std::filesystem::path& folder) {
  auto writer = std::make_unique<CheckpointWriter>(folder, run_.checkpoint);
  if (!writer->is_seen_by_all() && !std::exchange(is_noted_, true)) {
    note(
        fmt::format("warning: not every process sees the files that rank 0 writes in {}: rank 0 gathers the "
                    "state of the optimiser and writes checkpoints alone",
                    folder.parent_path().string()));
  }
  return writer;
}

/// Writes the checkpoint of the last completed step.
void Saves::write(const std::filesystem::path& folder, bool replaces) {
  const std::unique_ptr<CheckpointWriter> writer = begin(folder);
  writer->start(run_.trainer.decoder(), run_.trainer.optimizer(), run_.state);
  writer->finish(replaces);
}

/// Calls `save`, which saves `step`, or begins to and returns false. A failure is retried later, or thrown.
template <class Save>
void Saves::try_to_save(int64_t step, bool stop, const Save& save) {
  try {
    if (save()) schedule_.saved();
  } catch (const std::exception& error) {
    // Retrying does not make values finite.
    const bool hopeless = group_.any(dynamic_cast<const NonFiniteError*>(&error) != nullptr);
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
  try_to_save(run_.state.step, /*stop=*/false, [&] { return save_now(); });
  try_to_rescue();
}

void Saves::after_step(bool ends) {
  if (writing_ && !group_.any(!writing_->is_done())) finish_writing(ends);
  if (schedule_.is_due(run_.state.step, ends)) save(ends);
  try_to_rescue();
}

bool Saves::add_saved(int64_t step) {
  saved_ = step;
  needs_rescue_ = false;
  if (run_.events.saved) run_.events.saved(checkpoint_folder(options_.out, step));
  try {
    forget_rescued(/*before=*/step + 1);
    if (group_.is_first()) remove_old_checkpoints(options_.out, options_.keep_last, options_.keep_every);
  } catch (const std::exception& error) {
    note(fmt::format("warning: an old checkpoint could not be removed: {}", error.what()));
  }
  return true;
}

/// Saves a step that is due; a failure may be retried later.
void Saves::save(bool stop) {
  if (writing_) finish_writing(stop);
  const bool waits = !options_.save_in_background || stop || run_.state.step >= run_.last;
  try_to_save(run_.state.step, stop, [&] { return (waits || !start_in_background()) && save_now(); });
}

/// Returns false if there is no memory for a copy.
bool Saves::start_in_background() {
  std::unique_ptr<CheckpointWriter> writer = begin(checkpoint_folder(options_.out, run_.state.step));
  try {
    writer->start(run_.trainer.decoder(), run_.trainer.optimizer(), run_.state, /*in_background=*/true);
  } catch (const std::exception& error) {
    note(fmt::format("warning: step {} is not saved in the background: {}", run_.state.step, text_of(error)));
    return false;
  }
  writing_ = std::move(writer);
  return true;
}

/// Waits for the checkpoint that is being written.
void Saves::finish_writing(bool stop) {
  const std::unique_ptr<CheckpointWriter> written = std::move(writing_);
  try_to_save(written->step(), stop, [&] {
    written->finish();
    return add_saved(written->step());
  });
}

bool Saves::save_best() {
  try {
    write(best_checkpoint_folder(options_.out), /*replaces=*/true);
    best_error_.clear();
  } catch (const std::exception& error) {
    best_error_ = text_of(error);
    best_failed_step_ = run_.state.step;
    note(fmt::format(
        "warning: the best checkpoint, that of step {}, could not be saved: {}; the run continues",
        run_.state.step, best_error_));
  }
  return best_error_.empty();
}

std::string Saves::best_failure() const {
  if (best_error_.empty()) return "";
  return fmt::format("the best checkpoint, that of step {}, could not be saved: {}", best_failed_step_,
                     best_error_);
}

bool Saves::forget_lost(int64_t best_step) {
  const auto is_lost = [&](const std::filesystem::path& folder) {
    return group_.any(group_.is_first() && !std::filesystem::exists(folder));
  };
  if (is_lost(checkpoint_folder(options_.out, saved_))) saved_ = 0;
  if (best_step == 0 || !is_lost(best_checkpoint_folder(options_.out))) return false;
  best_error_ = "it was removed during the run";
  best_failed_step_ = best_step;
  return true;
}

/// Writes the last completed step, if one could not be saved, to the rescue folder in place of an older one.
void Saves::try_to_rescue() {
  if (!std::exchange(needs_rescue_, false) || options_.rescue_dir.empty() || rescued_ == run_.state.step)
    return;
  const auto folder = checkpoint_folder(options_.rescue_dir, run_.state.step);
  try {
    group_.together([&] { return run_.rescue_folder != nullptr && run_.rescue_folder->restore(); });
    write(folder);
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
  if (options_.rescue_dir.empty() || !group_.is_first()) return;
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
  if (const std::unique_ptr<CheckpointWriter> written = std::move(writing_)) {
    try {
      written->finish();
      add_saved(written->step());
    } catch (const std::exception& error) {
      note(fmt::format("warning: step {} could not be saved: {}", written->step(), text_of(error)));
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
  bool is_together = false;
  try {
    group_.check_equal("the step that is saved", std::to_string(step));
    is_together = true;
    if (!save_failed_ && saved_ < step) save_now();
  } catch (const std::exception& error) {
    why = fmt::format("step {} could not be saved: {}", step, text_of(error));
  }
  needs_rescue_ = is_together && saved_ < step;
  try_to_rescue();
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
