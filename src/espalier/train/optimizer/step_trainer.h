// SPDX-License-Identifier: Apache-2.0
// A model with its optimiser: accumulates gradients of steps and updates the weights. Used by the training
// loop and by the Engine of Python. On several ranks each has the whole model, and computes the gradients of
// its share of a step. Each adds up its part of them (Group::part), has the optimiser's state of that part,
// and gives the others the weights that it has updated.
#pragma once

#include <string>
#include <utility>

#include "espalier/distributed/group.h"
#include "espalier/engine/engine.h"
#include "espalier/engine/step.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/loss.h"
#include "espalier/train/optimizer/optimizer.h"

namespace espalier {

class StepTrainer {
 public:
  StepTrainer(Decoder decoder, const OptimizerOptions& options, const Group& group = alone())
      : group_(group), decoder_(std::move(decoder)), optimizer_(decoder_, options, group) {}
  StepTrainer(const StepTrainer&) = delete;  // the optimiser refers to the decoder
  StepTrainer& operator=(const StepTrainer&) = delete;

  Decoder& decoder() { return decoder_; }
  const Decoder& decoder() const { return decoder_; }
  Optimizer& optimizer() { return optimizer_; }
  const Optimizer& optimizer() const { return optimizer_; }

  /// Accumulates the gradients of the step's loss, over all ranks: each has the sum of its part, and nothing
  /// of meaning elsewhere. After an exception they contain part of the step's.
  StepResult add_gradients(const Step& step, const Loss& loss, const MicroBatchProgress& progress = {});

  void zero_gradients() { decoder_.zero_gradients(); }

  /// Gives all ranks the whole gradients.
  void gather_gradients() const { group_.gather_parts(decoder_.gradients()); }

  /// L2 norm of the gradients of all ranks.
  double gradient_norm() const {
    return group_.reduce({optimizer_.gradient_norm()}, {RankReduction::kNorm}).front();
  }

  /// Optimizer::update, and all ranks' weights. A rank that fails is learnt of by all. Before a
  /// NonFiniteError it gathers the gradients.
  void update(double learning_rate, double norm);

  /// Whether an exception interrupted an update, so that weights and optimiser are inconsistent.
  bool is_half_updated() const { return is_half_updated_; }
  /// Call after loading weights and optimiser.
  void forget_half_update() { is_half_updated_ = false; }

 private:
  const Group& group_;
  Decoder decoder_;
  Optimizer optimizer_;
  bool is_half_updated_ = false;
};

/// Throws NonFiniteError unless loss and gradient norm are finite; the message starts with `title` and
/// includes explain_nonfinite, by the rank that finds most in its share. All ranks have the same value and
/// norm, and then the whole gradients.
void check_finite(const Decoder& decoder, const Step& step, const Loss& loss, const std::string& title,
                  double value, double norm, const Group& group = alone());

}  // namespace espalier
