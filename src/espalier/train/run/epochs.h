// SPDX-License-Identifier: Apache-2.0
// The trajectories of each optimiser step of a training run.
#pragma once

#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/engine/share.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// Rows of every optimiser step of an epoch. Trajectories with equal group_id are in the same step, unless
/// single rows are shuffled, and likewise pairs if the objective compares them; step sizes are then as close
/// to options.batch_size as whole groups allow. Every epoch has the same number of steps.
std::vector<std::vector<int64_t>> epoch_batches(const Trajectories& trajectories, const TrainOptions& options,
                                                int64_t epoch);

int64_t steps_per_epoch(const Trajectories& trajectories, const TrainOptions& options);

/// A note on step sizes if keeping groups whole makes them differ from --batch-size; "" otherwise.
std::string uneven_steps_note(const Trajectories& trajectories, const TrainOptions& options);

/// Number of optimiser steps of a run. Throws InputError if it exceeds kMostSteps.
int64_t total_steps(const Trajectories& trajectories, const TrainOptions& options);

/// Throws InputError naming step and rows if one of the steps `first` + 1 to `last` has no token that carries
/// loss. With shuffling, only a limited number of rows is checked.
void check_loss_of_steps(const Trajectories& trajectories, const TrainOptions& options, int64_t first,
                         int64_t last);

/// Makes the steps of a run, by index from 0: this rank's shares. The next one can be made in a thread. Its
/// functions are called by one thread.
class Steps {
 public:
  /// `loss` and `options` must outlive this object.
  Steps(const Loss& loss, const TrainOptions& options) : loss_(loss), options_(options) {}

  Step take(int64_t index);

  /// Makes the step with the longest trajectory among [first, last) of the epoch of `first`, to throw early
  /// what take() would throw if the plan's budgets are too small.
  void try_longest(int64_t first, int64_t last);

  /// Begins to make the step that take(index) will return. Errors are thrown by take(index).
  void make_ahead(int64_t index);

 private:
  const std::vector<std::vector<int64_t>>& batches_of(int64_t index);  // of the epoch of `index`
  Step make(int64_t index);

  const Loss& loss_;
  const TrainOptions& options_;
  std::vector<std::vector<int64_t>> batches_;  // of the current epoch
  int64_t epoch_ = 0;
  int64_t ahead_index_ = 0;
  std::future<Step> ahead_;  // last, so that its thread ends first
};

}  // namespace espalier
