// SPDX-License-Identifier: Apache-2.0
// A model in training: gradients of steps add up, then an update uses them. The training loop and the Engine
// of Python are made of this.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <utility>

#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"
#include "espalier/train/optimizer/optimizer.h"

namespace espalier {

class StepTrainer {
 public:
  StepTrainer(Decoder decoder, const OptimizerOptions& options)
      : decoder_(std::move(decoder)), optimizer_(decoder_, options) {}
  StepTrainer(const StepTrainer&) = delete;  // the optimiser refers to the decoder
  StepTrainer& operator=(const StepTrainer&) = delete;

  Decoder& decoder() { return decoder_; }
  const Decoder& decoder() const { return decoder_; }
  Optimizer& optimizer() { return optimizer_; }
  const Optimizer& optimizer() const { return optimizer_; }

  /// Adds the gradients of the step's loss to those that there are. `meanwhile` is called once all work has
  /// been handed to the device. After an exception the gradients hold a part of the step's as well.
  StepResult add_gradients(const Step& step, const Loss& loss, const MicroBatchProgress& progress = {},
                           const std::function<void()>& meanwhile = {});

  void zero_gradients() { decoder_.zero_gradients(); }

  /// Clips the gradients, whose norm is `norm`, and updates the weights. Throws NonFiniteError, before
  /// anything is changed, as Optimizer::update does.
  void update(double learning_rate, double norm);

  /// Whether an exception ended an update half-way, so that weights and optimiser are of no step.
  bool is_half_updated() const { return is_half_updated_; }
  /// Weights and optimiser have been loaded since.
  void forget_half_update() { is_half_updated_ = false; }

 private:
  Decoder decoder_;
  Optimizer optimizer_;
  bool is_half_updated_ = false;
};

/// NonFiniteError unless loss and gradient norm of a step that has run are finite; says why, as
/// explain_nonfinite does. `title`: how the message begins.
void check_finite(const Decoder& decoder, const Step& step, const Loss& loss, const std::string& title,
                  double value, double norm);

/// The message of an exception, without the backtrace of LibTorch's.
std::string text_of(const std::exception& error);

}  // namespace espalier
