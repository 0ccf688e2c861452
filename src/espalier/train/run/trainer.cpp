// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/trainer.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/hash.h"
#include "espalier/base/mapped_file_guard.h"
#include "espalier/data/reader.h"
#include "espalier/engine/order.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/objective/signal.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/train/optimizer/diagnosis.h"
#include "espalier/train/optimizer/optimizer.h"
#include "espalier/train/optimizer/step_trainer.h"
#include "espalier/train/run/checkpoint.h"
#include "espalier/train/run/load_model.h"
#include "espalier/train/run/metrics.h"
#include "espalier/train/run/resume.h"
#include "espalier/train/run/run_folder.h"
#include "espalier/train/run/saves.h"

namespace espalier {
namespace {

// Number of the step to profile; 0: none. By default not the first step, which allocates memory.
int64_t profiled_step(const TrainOptions& options, int64_t first, int64_t last) {
  if (options.profiler == nullptr) return 0;
  if (options.profile_step == 0) return std::min(first + 2, last);
  ESPALIER_CHECK(first < options.profile_step && options.profile_step <= last,
                 "--profile-step: expected one of the steps {} to {}, which this run takes, received {}",
                 first + 1, last, options.profile_step);
  return options.profile_step;
}

std::string hash_text(const std::string& text) {
  Hasher hasher;
  hasher.add_values(std::span<const char>(text));
  return hasher.digits();
}

/// A training run, from its first step or from a checkpoint, to its last step.
class TrainingRun {
 public:
  /// Loads the model and, on resume, the state of the run.
  TrainingRun(const Trajectories& trajectories, const TrainOptions& options, const TrainEvents& events,
              const std::atomic<bool>* stop, const HeldOut* held_out)
      : options_(options),
        events_(events),
        stop_(stop),
        group_(*options.group),
        folder_(group_.is_first()
                    ? std::optional<RunFolder>(std::in_place, options.out, events.files, events.note)
                    : std::nullopt),
        rescue_folder_(folder_ && !options.rescue_dir.empty()
                           ? std::optional<RunFolder>(std::in_place, options.rescue_dir,
                                                      std::vector<RunFile>(), events.note)
                           : std::nullopt),
        last_(total_steps(trajectories, options)),
        evaluator_(held_out ? std::optional<Evaluator>(std::in_place, *held_out, options) : std::nullopt),
        checkpoint_{SourceModel(options.model), options.save_dtype, &group_},
        trainer_(load_model(options), options.optimizer, group_),
        cost_(cost_of(trainer_.decoder())),
        state_(run_state_of(trajectories, options)),
        resumed_(resume_run()),
        first_(resumed_.empty() ? 0 : step_of(resumed_)),
        saves_({options, events, trainer_, state_, checkpoint_, rescue_folder_ ? &*rescue_folder_ : nullptr,
                last_},
               resumed_) {
    group_.check_equal("the settings and data of the run", hash_text(to_json(state_).dump()));
    state_.step = first_;
    if (first_ > 0) state_.skipped_steps = read_run_state(resumed_).skipped_steps;
    if (evaluator_) resume_evaluations();
    if (!state_.taken) {
      use_rows(trajectories);
    } else if (first_ > 0) {
      follow_on(read_run_state(resumed_));
    }
  }

  /// Returns false if it was stopped before the last step.
  bool run() {
    if (first_ < last_ && !state_.taken) check_before_the_first_step();
    if (folder_) folder_->write_files();
    saves_.bring_back();
    if (events_.started) events_.started(last_, first_);
    const bool evaluates_first = is_evaluation_due();
    if (!evaluates_first && has_nothing_to_do()) return true;
    if (first_ < last_) profiled_ = profiled_step(options_, first_, last_);
    if (folder_) {
      writer_.emplace(options_.out, MetricsStart{.resumed_step = first_, .evaluates_it = evaluates_first},
                      events_.note);
    }
    bool finished = false;
    try {
      finished = take_steps();
      end(finished);
    } catch (const std::exception& error) {
      if (writer_) writer_->finish();
      if (state_.step == first_) throw;  // no step to save
      end_with(error);
    }
    if (writer_) writer_->finish();
    return finished;
  }

 private:
  void note(const std::string& text) const {
    if (events_.note) events_.note(text);
  }

  bool stops_here() const { return stop_ != nullptr && stop_->load(); }
  /// Whether some rank has been told to stop.
  bool stopping() const { return group_.any(stops_here()); }

  /// The first rank chooses the checkpoint, and the others take it.
  std::filesystem::path resume_run() {
    Decoder* decoder = &trainer_.decoder();
    Optimizer* optimizer = &trainer_.optimizer();
    std::filesystem::path folder;
    if (folder_) folder = resume({options_, checkpoint_.source, state_}, decoder, optimizer, events_.note);
    folder = group_.gather(folder.string()).front();
    if (!folder_ && !folder.empty()) load_checkpoint(folder, decoder, optimizer);
    return folder;
  }

  /// Throws InputError early for errors that would occur in a later step.
  void check_before_the_first_step() {
    check_loss_of_steps(loss_->trajectories(), options_, first_, last_);
    steps_->try_longest(first_, last_);
  }

  void use_rows(const Trajectories& rows) {
    loss_.emplace(make_loss(rows, options_.objective, options_.mix));
    steps_.emplace(*loss_, options_);
  }

  // ---- Rows that come while the run goes on

  /// Takes the files of the next steps. Returns false if there will be none, or the run is stopped.
  bool take_rows() {
    TakenFiles taken = *state_.taken;
    taken.newest.clear();
    for (bool waits = false; taken.newest.empty();) {
      if (stopping()) return false;
      nlohmann::json names;
      if (folder_) {
        if (auto next = next_files(options_.follow, taken.names, options_.follow_files)) names = *next;
      }
      names = nlohmann::json::parse(group_.gather(names.dump()).front());
      if (names.is_null()) return false;
      names.get_to(taken.newest);
      if (!taken.newest.empty()) continue;
      if (!std::exchange(waits, true)) note("waiting for rows in " + options_.follow.string());
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    read_rows(taken.newest);
    taken.names.insert(taken.newest.begin(), taken.newest.end());
    taken.first_step = state_.step;
    taken.last_step = state_.step + options_.epochs * steps_per_epoch(followed_, options_);
    state_.taken = std::move(taken);  // last: no checkpoint names files that cannot be used
    return true;
  }

  void read_rows(const std::vector<std::string>& names) {
    steps_.reset();
    followed_ = events_.read(names);
    use_rows(followed_);
    state_.data_rows = followed_.num_rows();
    state_.data_tokens = followed_.num_tokens();
    state_.data_hashes = content_hashes(followed_);
    group_.check_equal("the rows that were taken", nlohmann::json(state_.data_hashes).dump());
  }

  /// Continues with the files of a checkpoint.
  void follow_on(const RunState& saved) {
    state_.taken = saved.taken;
    if (saved.taken->last_step == first_) return;
    read_rows(saved.taken->newest);
    ESPALIER_CHECK(state_.data_hashes == saved.data_hashes,
                   "--resume: the rows that the run has taken are not those of {}",
                   nlohmann::json(saved.taken->newest).dump());
  }

  bool take_steps() {
    if (is_evaluation_due() && !make_up_for_evaluation()) return false;
    while (state_.step < last_ && !ends_early()) {
      if (state_.step == first_ && stopping()) return false;  // before the first step
      if (state_.taken && state_.step == state_.taken->last_step && !take_rows()) {
        if (stopping()) return false;
        last_ = state_.step;
        if (is_evaluation_due()) evaluate();
        break;
      }
      const nlohmann::ordered_json metrics = take_step(state_.step + 1);
      restore_folder();
      if (writer_) writer_->write(state_.step, metrics);
      if (events_.step) events_.step(state_.step, metrics);
      if (folder_) saves_.publish();
      if (is_evaluation_due()) evaluate();
      saves_.after_step(/*ends=*/stopping() || ends_early());
      if (stopping() && (state_.step < last_ || is_evaluation_due()) && !ends_early()) return false;
    }
    if (ends_early()) note(fmt::format("stopped early: {}", early_stop_text(*state_.evaluation)));
    return true;
  }

  // ---- The folder

  /// Restores the folder if it was removed, and resets the state of checkpoints that were lost.
  void restore_folder() {
    bool was_restored = false;
    try {
      on_first([&] { was_restored = folder_->restore(); });
    } catch (const std::exception&) {
      saves_.give_up();
      throw;
    }
    if (!group_.any(was_restored)) return;
    const bool keeps_best = evaluator_ && evaluator_->options().keep_best;
    if (!saves_.forget_lost(keeps_best ? state_.evaluation->best_step : 0)) return;
    state_.evaluation->best_step = 0;
    state_.evaluation->best_loss = 0;
  }

  /// Writes the last checkpoint. Throws InputError if files of the folder are missing.
  void end(bool finished) {
    restore_folder();
    if (saves_.saved() < state_.step) saves_.save_now();
    on_first([&] {
      ESPALIER_CHECK(folder_->failure().empty(), "{}", folder_->failure());
      ESPALIER_CHECK(!finished || saves_.best_failure().empty(), "{}", saves_.best_failure());
    });
  }

  // ---- Evaluations

  /// Resumes the evaluation state of the checkpoint if the held-out rows and the best checkpoint are
  /// unchanged.
  void resume_evaluations() {
    const EvaluationState fresh = evaluator_->initial_state();
    state_.evaluation = fresh;
    if (first_ == 0) return;
    const std::optional<EvaluationState> saved = read_run_state(resumed_).evaluation;
    if (!saved) return;
    if (saved->data_hashes != fresh.data_hashes) {
      note("the held-out rows have changed: the evaluation state is reset");
      return;
    }
    state_.evaluation = saved;
    const bool keeps_best = evaluator_->options().keep_best && saved->best_step > 0;
    if (!keeps_best || std::filesystem::exists(best_checkpoint_folder(options_.out))) return;
    note(fmt::format("{} is missing: the best evaluation is reset",
                     best_checkpoint_folder(options_.out).string()));
    state_.evaluation->best_step = 0;
    state_.evaluation->best_loss = 0;
  }

  /// Whether an evaluation is due after the last step and has not been made.
  bool is_evaluation_due() const {
    return evaluator_ && evaluator_->is_due(state_.step, last_) && state_.evaluation->step < state_.step;
  }

  bool ends_early() const { return evaluator_ && evaluator_->stops(*state_.evaluation); }

  /// Makes the evaluation that a stopped run has missed. Returns false if it is stopped again.
  bool make_up_for_evaluation() {
    evaluate();
    if (is_evaluation_due()) return false;
    // No later checkpoint will record the result.
    if (state_.step == last_ || ends_early()) saves_.replace();
    return true;
  }

  /// Evaluates the current weights, unless the run is stopped meanwhile.
  void evaluate() {
    if (stopping()) return;
    const auto result = evaluator_->evaluate(trainer_.decoder(), [&](int64_t done, int64_t total) {
      if (stops_here() && done < total) throw Evaluator::Stopped();
      if (events_.evaluating) events_.evaluating(state_.step, done, total);
    });
    if (!result) return;
    nlohmann::ordered_json values = {{"step", state_.step}};
    values.update(*result);
    const EvaluationState before = *state_.evaluation;
    const bool is_best = Evaluator::add(state_.step, values["eval_loss"], &*state_.evaluation);
    if (writer_) writer_->write_evaluation(state_.step, values);
    if (events_.evaluated) events_.evaluated(state_.step, values, *state_.evaluation);
    if (!is_best || !evaluator_->options().keep_best) return;
    if (saves_.save_best()) return;
    // The next evaluation that is better tries again.
    state_.evaluation->best_step = before.best_step;
    state_.evaluation->best_loss = before.best_loss;
  }

  /// Also notes the reason.
  bool has_nothing_to_do() const {
    if (first_ >= last_) {
      note(fmt::format("nothing to do: step {} of {} is reached already", first_, last_));
    } else if (ends_early()) {
      note(fmt::format("nothing to do: the run has stopped early after step {}: {}", first_,
                       early_stop_text(*state_.evaluation)));
    }
    return first_ >= last_ || ends_early();
  }

  // ---- Steps

  /// Forward, backward and update of step `number` (from 1). Returns its metrics.
  nlohmann::ordered_json take_step(int64_t number) {
    if (number == profiled_) options_.profiler->start();
    const auto begin = std::chrono::steady_clock::now();
    const auto [before, end] = state_.taken ? std::pair(state_.taken->first_step, state_.taken->last_step)
                                            : std::pair(int64_t{0}, last_);
    const Step step = steps_->take(number - 1 - before);
    if (number < end) steps_->make_ahead(number - before);
    const StepResult result = compute_gradients(number, step);
    check_mapped_files();  // discard gradients if mapped data has disappeared
    const double rate = options_.learning_rate *
                        schedule_factor(options_.scheduler, number - 1, last_, options_.warmup_steps);
    const double norm = trainer_.gradient_norm();
    std::vector<std::pair<std::string, double>> norms;  // before clipping
    if (options_.log_grad_norms) norms = grad_norms_by_kind(trainer_.decoder(), group_);
    update(number, step, result.loss, rate, norm);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (number == profiled_) finish_profile(result);

    nlohmann::ordered_json metrics = {{"step", number}};
    metrics.update(step_metrics(cost_, options_.objective, result, seconds));
    for (const auto& [name, value] : signal_metrics(*loss_, step.whole.rows)) metrics[name] = value;
    if (options_.predicted_costs) add_prediction(number, step, result, &metrics);
    metrics["grad_norm"] = norm;
    for (const auto& [kind, value] : norms) metrics["grad_norm/" + kind] = value;
    metrics["learning_rate"] = rate;
    if (state_.skipped_steps > 0) metrics["skipped_steps"] = state_.skipped_steps;
    return metrics;
  }

  StepResult compute_gradients(int64_t number, const Step& step) {
    trainer_.zero_gradients();
    const auto micro_batch = [&](int64_t done, int64_t total) {
      if (events_.micro_batch) events_.micro_batch(number, done, total);
    };
    return trainer_.add_gradients(step, *loss_, micro_batch);
  }

  /// Updates the weights, or leaves a bad step out, which completes the step.
  void update(int64_t number, const Step& step, double loss, double rate, double norm) {
    try {
      check_finite(trainer_.decoder(), step, *loss_, fmt::format("step {}", number), loss, norm, group_);
      update_weights(number, step, rate, norm);
    } catch (const NonFiniteError& error) {
      const bool may_skip = state_.skipped_steps < options_.skip_bad_steps;
      if (!may_skip || !nonfinite_parameters(trainer_.decoder()).empty()) throw;
      ++state_.skipped_steps;
      note(fmt::format("warning: {}; its update is left out ({} of at most {})", error.what(),
                       state_.skipped_steps, options_.skip_bad_steps));
    }
    state_.step = number;
  }

  void update_weights(int64_t number, const Step& step, double rate, double norm) {
    try {
      trainer_.update(rate, norm);
    } catch (const NonFiniteError& error) {
      throw NonFiniteError(fmt::format("step {}: {}; {}; the step has rows {}", number, error.what(),
                                       worst_gradient(trainer_.decoder()),
                                       row_list(loss_->trajectories(), step.whole.rows)));
    }
  }

  /// Failure to write a profile does not end the run.
  void finish_profile(const StepResult& result) const {
    try {
      note(options_.profiler->stop(trainer_.decoder(), result));
    } catch (const std::exception& error) {
      note(fmt::format("warning: no profile: {}", text_of(error)));
    }
  }

  void add_prediction(int64_t number, const Step& step, const StepResult& result,
                      nlohmann::ordered_json* metrics) const {
    const StepPrediction prediction =
        predict_step(*options_.predicted_costs, step,
                     needs_logprob_pass(step, *loss_) || needs_routing_pass(step, *loss_));
    (*metrics)["predicted_seconds"] = prediction.total_seconds();
    (*metrics)["predicted_peak_bytes"] = prediction.largest_peak_bytes();
    if (events_.predicted && number == first_ + 1) events_.predicted(step, prediction, result);
  }

  /// Calls `body` on the first rank, which has the folder. All ranks throw what it throws.
  template <class Body>
  void on_first(const Body& body) const {
    group_.together([&] {
      if (folder_) body();
      return true;
    });
  }

  /// Saves the completed steps, if possible, and throws RunError.
  [[noreturn]] void end_with(const std::exception& error) {
    const std::string outcome = saves_.end_after_error();
    if (!folder_) throw;
    throw RunError(fmt::format("{}; {}", text_of(error), outcome));
  }

  const TrainOptions& options_;
  const TrainEvents& events_;
  const std::atomic<bool>* stop_;
  const Group& group_;
  // What the first rank writes; nullopt on others.
  std::optional<RunFolder> folder_, rescue_folder_;
  std::optional<MetricsWriter> writer_;
  int64_t last_;
  std::optional<Evaluator> evaluator_;  // before the trainer, to check held-out rows before loading the model
  CheckpointOptions checkpoint_;
  StepTrainer trainer_;
  ModelCost cost_;
  Trajectories followed_;  // of the newest files of --follow
  std::optional<Loss> loss_;
  std::optional<Steps> steps_;
  RunState state_;                 // state_.step: the last completed step
  std::filesystem::path resumed_;  // checkpoint resumed from; empty: none
  int64_t first_;                  // its step
  Saves saves_;
  int64_t profiled_ = 0;
};

}  // namespace

bool train(const Trajectories& trajectories, const TrainOptions& options, const TrainEvents& events,
           const std::atomic<bool>* stop, const HeldOut* held_out) {
  check_train_options(options);
  if (held_out != nullptr) check_evaluation_options(held_out->options);
  ESPALIER_CHECK(trajectories.num_rows() > 0 || !options.follow.empty(),
                 "expected trajectories to train on, received none");
  return TrainingRun(trajectories, options, events, stop, held_out).run();
}

}  // namespace espalier
