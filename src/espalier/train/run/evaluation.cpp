// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/evaluation.h"

#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/options.h"
#include "espalier/base/units.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/engine/share.h"

namespace espalier {
namespace {

// Adds to InputErrors that they concern the held-out rows.
template <class Make>
auto on_held_out(const Make& make) {
  try {
    return make();
  } catch (const InputError& error) {
    throw InputError(fmt::format("--eval-data: {}", error.what()));
  }
}

}  // namespace

void add_evaluation_options(EvaluationOptions* options, OptionList* list) {
  list->group("Evaluation");
  list->add("eval-every", &options->every, "Steps between evaluations (0: only after the last step)",
            {.least = 0, .most = kMostSteps});
  list->add("keep-best", &options->keep_best,
            "Keep the checkpoint with the lowest evaluation loss as OUT/checkpoints/best");
  list->add("early-stop", &options->early_stop,
            "Stop training, with a final checkpoint, after so many evaluations in a row without a lower loss "
            "(0: never)",
            {.least = 0, .most = kMostSteps});
}

void check_evaluation_options(const EvaluationOptions& options) {
  EvaluationOptions copy = options;
  OptionList list;
  add_evaluation_options(&copy, &list);
  list.check();
}

Evaluator::Evaluator(const HeldOut& held_out, const TrainOptions& options)
    : held_out_(held_out),
      group_(*options.group),
      loss_(on_held_out([&] { return Loss(held_out.trajectories, options.objective); })),
      step_(on_held_out([&] {
        ESPALIER_CHECK(held_out.trajectories.num_rows() > 0, "expected trajectories, received none");
        std::vector<int64_t> rows(held_out.trajectories.num_rows());
        std::iota(rows.begin(), rows.end(), 0);
        return make_share(loss_, std::move(rows),
                          {options.plan, options.objective, options.costs ? &*options.costs : nullptr,
                           TermChoice::kWithLoss},
                          *options.group);
      })) {
  check_evaluation_options(held_out.options);
}

std::optional<nlohmann::ordered_json> Evaluator::evaluate(const Decoder& decoder,
                                                          const MicroBatchProgress& progress) const {
  const auto begin = std::chrono::steady_clock::now();
  std::optional<PendingEvaluation> pending;
  try {
    pending = start_evaluation(decoder, step_, loss_, progress);
  } catch (const Stopped&) {  // NOLINT(bugprone-empty-catch)
  }
  if (group_.any(!pending)) return std::nullopt;
  const StepResult result = finish(*std::move(pending), group_);
  check_mapped_files();  // discard results if mapped data has disappeared
  nlohmann::ordered_json values = {{"eval_loss", result.loss}};
  // The last metric is nll_per_token, which every objective has.
  values["eval_" + result.metrics.back().name] = result.metrics.back().value;
  for (const StepMetric& metric : result.metrics) values["eval_" + metric.name] = metric.value;
  values["eval_flat_tokens"] = result.flat_tokens;
  values["eval_encoded_tokens"] = result.work.tokens;
  values["eval_loss_terms"] = result.terms;
  values["eval_seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return values;
}

bool Evaluator::add(int64_t step, double loss, EvaluationState* state) {
  const bool is_better = std::isfinite(loss) && (state->best_step == 0 || loss < state->best_loss);
  state->step = step;
  if (is_better) {
    state->best_step = step;
    state->best_loss = loss;
    state->since_best = 0;
  } else {
    ++state->since_best;
  }
  return is_better;
}

std::string early_stop_text(const EvaluationState& state) {
  const std::string count = count_of(state.since_best, "evaluation", "evaluations");
  if (state.best_step == 0) return fmt::format("{} in a row without a finite loss", count);
  return fmt::format("{} in a row without a loss below {:.6g}, that of step {}", count, state.best_loss,
                     state.best_step);
}

}  // namespace espalier
