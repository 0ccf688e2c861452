// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/optimizer/step_trainer.h"

#include <fmt/format.h>

#include <cmath>
#include <exception>
#include <utility>

#include "espalier/runtime/out_of_memory.h"
#include "espalier/train/optimizer/diagnosis.h"

namespace espalier {

StepResult StepTrainer::add_gradients(const Step& step, const Loss& loss,
                                      const MicroBatchProgress& progress) {
  group_.check_equal("the step's rows, terms and shares", step.whole.digest);
  // Gradients of earlier steps are those of all ranks, and are added up again with the new ones.
  if (!group_.is_first()) decoder_.zero_gradients();
  PendingStep pending =
      group_.together([&] { return start_forward_backward(decoder_, step, loss, progress, group_); });
  StepResult result = finish(std::move(pending), group_);
  // An expert without tokens gets a zero gradient, so that its moments decay as those of fused experts do.
  decoder_.complete_gradients();
  group_.add_up(decoder_.gradients());
  return result;
}

double StepTrainer::gradient_norm() const {
  const double norm = optimizer_.gradient_norm();
  group_.check_equal("the norm of the gradients", fmt::format("{:a}", norm));
  return norm;
}

void StepTrainer::update(double learning_rate, double norm) {
  is_half_updated_ = true;
  try {
    optimizer_.update(learning_rate, norm);
  } catch (const NonFiniteError&) {
    is_half_updated_ = false;  // thrown before any change
    throw;
  }
  is_half_updated_ = false;
}

void check_finite(const Decoder& decoder, const Step& step, const Loss& loss, const std::string& title,
                  double value, double norm, const Group& group) {
  if (std::isfinite(value) && std::isfinite(norm)) return;
  std::string why;
  try {
    why = explain_nonfinite(decoder, step, loss);
  } catch (const std::exception& error) {
    why = fmt::format("the reason could not be found: {}", text_of(error));
  }
  for (const std::string& found : group.gather(why)) {
    if (found.size() > why.size()) why = found;
  }
  throw NonFiniteError(fmt::format("{}: loss {}, gradient norm {}: expected finite numbers{}{}", title, value,
                                   norm, why.empty() ? "" : "; ", why));
}

}  // namespace espalier
