// SPDX-License-Identifier: Apache-2.0
// Which trajectories each optimiser step of a run trains on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/engine/batch.h"
#include "espalier/train/train_options.h"

namespace espalier {

/// Rows of every optimiser step of an epoch. Trajectories with equal group_id are in one step, unless rows
/// are shuffled singly, and so are those with equal pair_id where the objective compares pairs: steps then
/// have about options.batch_size of them, as near as whole groups allow. Every epoch has the same number of
/// steps.
std::vector<std::vector<int64_t>> epoch_batches(const Trajectories& trajectories, const TrainOptions& options,
                                                int64_t epoch);

int64_t steps_per_epoch(const Trajectories& trajectories, const TrainOptions& options);

/// A line that says how large the steps are, where keeping groups whole makes them differ from --batch-size;
/// "" otherwise.
std::string uneven_steps_note(const Trajectories& trajectories, const TrainOptions& options);

/// Number of optimiser steps that the options ask for. Throws InputError where that is more than kMostSteps.
int64_t total_steps(const Trajectories& trajectories, const TrainOptions& options);

/// Throws InputError naming step and rows where one of the steps `first` + 1 to `last` of a run has no token
/// that carries loss. Of shuffled runs of very many epochs the first ones are looked at.
void check_loss_of_steps(const Trajectories& trajectories, const TrainOptions& options, int64_t first,
                         int64_t last);

/// Makes the steps of a run, by index from 0. Can make the next one while the device works on this one.
class Steps {
 public:
  /// Both must outlive this object.
  Steps(const Trajectories& trajectories, const TrainOptions& options)
      : trajectories_(trajectories), options_(options) {}

  Step take(int64_t index);

  /// Tries the step with the longest trajectory, from index `first` to before `last` or the end of the epoch.
  /// Throws what take() would throw where the plan's budgets are too small for it.
  void try_longest(int64_t first, int64_t last);

  /// Makes the step of `index` now, so that take(index) has it at once. Where this fails, take(index) throws.
  void make_ahead(int64_t index);

 private:
  const std::vector<std::vector<int64_t>>& batches_of(int64_t index);  // of its epoch
  Step make(int64_t index);

  const Trajectories& trajectories_;
  const TrainOptions& options_;
  std::vector<std::vector<int64_t>> batches_;  // of the epoch
  int64_t epoch_ = 0;
  std::optional<Step> ahead_;
  int64_t ahead_index_ = 0;
};

}  // namespace espalier
