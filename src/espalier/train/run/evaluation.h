// SPDX-License-Identifier: Apache-2.0
// Evaluation of a training run on held-out rows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/train/run/run_state.h"
#include "espalier/train/train_options.h"

namespace espalier {

struct EvaluationOptions {
  int64_t every = 0;       // steps between evaluations; after the last step there is always one
  bool keep_best = false;  // keep the checkpoint of the best evaluation (best_checkpoint_folder)
  int64_t early_stop = 0;  // stop after so many evaluations in a row without improvement; 0: never
};

/// Held-out rows and how they are evaluated.
struct HeldOut {
  Trajectories trajectories;
  EvaluationOptions options;
};

void add_evaluation_options(EvaluationOptions* options, OptionList* list);

/// Throws InputError naming an option that is out of its range.
void check_evaluation_options(const EvaluationOptions& options);

/// Evaluates the objective on all held-out rows as one step: the normaliser is over all rows, and results do
/// not depend on micro-batches beyond rounding.
class Evaluator {
 public:
  /// `held_out` and `options` must outlive this object. Throws InputError if the objective cannot be computed
  /// on the rows, or they do not fit the plan's budgets.
  Evaluator(const HeldOut& held_out, const TrainOptions& options);

  const EvaluationOptions& options() const { return held_out_.options; }
  const Step& step() const { return step_; }

  /// Whether an evaluation follows this step of a run with `last` steps.
  bool is_due(int64_t step, int64_t last) const {
    return step > 0 && (step == last || (options().every > 0 && step % options().every == 0));
  }

  /// Thrown by the progress of an evaluation, to end it.
  struct Stopped {};

  /// {"eval_loss": ..., "eval_nll_per_token": ..., other metrics of the objective, "eval_flat_tokens": ...,
  /// "eval_encoded_tokens": ..., "eval_seconds": ...}, from evaluate() (engine/engine.h) over all ranks.
  /// nullopt if a rank's progress has thrown Stopped.
  std::optional<nlohmann::ordered_json> evaluate(const Decoder& decoder,
                                                 const MicroBatchProgress& progress) const;

  /// The state before the first evaluation.
  EvaluationState initial_state() const { return {.data_hashes = content_hashes(held_out_.trajectories)}; }

  /// Adds an evaluation to the state. Returns whether its loss is finite and the lowest so far.
  static bool add(int64_t step, double loss, EvaluationState* state);

  /// Whether to stop early after the last evaluation.
  bool stops(const EvaluationState& state) const {
    return options().early_stop > 0 && state.since_best >= options().early_stop;
  }

 private:
  const HeldOut& held_out_;
  const Group& group_;
  Loss loss_;
  Step step_;
};

/// "3 evaluations in a row without a loss below 1.25, that of step 40"
std::string early_stop_text(const EvaluationState& state);

}  // namespace espalier
