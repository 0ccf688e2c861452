// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/optimizer/step_trainer.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cmath>
#include <exception>
#include <utility>

#include "espalier/train/optimizer/diagnosis.h"

namespace espalier {

StepResult StepTrainer::add_gradients(const Step& step, const Loss& loss, const MicroBatchProgress& progress,
                                      const std::function<void()>& meanwhile) {
  PendingStep pending = start_forward_backward(decoder_, step, loss, progress);
  if (meanwhile) meanwhile();
  StepResult result = finish(std::move(pending));
  // An expert without tokens gets a zero gradient, so that its moments decay as those of fused experts do.
  decoder_.complete_gradients();
  return result;
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
                  double value, double norm) {
  if (std::isfinite(value) && std::isfinite(norm)) return;
  std::string why;
  try {
    why = explain_nonfinite(decoder, step, loss);
  } catch (const std::exception& error) {
    why = fmt::format("the reason could not be found: {}", text_of(error));
  }
  throw NonFiniteError(fmt::format("{}: loss {}, gradient norm {}: expected finite numbers{}{}", title, value,
                                   norm, why.empty() ? "" : "; ", why));
}

std::string text_of(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  return torch != nullptr ? torch->what_without_backtrace() : error.what();
}

}  // namespace espalier
