// SPDX-License-Identifier: Apache-2.0
// What a training run is asked to do.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/options.h"
#include "espalier/config/lora.h"
#include "espalier/engine/cost.h"
#include "espalier/measure/profile.h"
#include "espalier/objective/mix.h"
#include "espalier/objective/objective.h"
#include "espalier/train/optimizer/optimizer.h"

namespace espalier {

/// In which order the trajectories are trained on in an epoch: as they stand, or shuffled by the seed in
/// whole groups (equal group_id; a row without one is a group of its own), or singly. Only the last one lets
/// a step split a group: without shuffling the rows of a group follow its first one.
enum class Shuffle { kNone, kGroups, kRows };

struct TrainOptions {
  std::filesystem::path model;
  std::filesystem::path out;
  at::ScalarType dtype = at::kFloat;
  at::ScalarType save_dtype = at::kFloat;
  at::Device device = at::kCPU;  // opened (runtime/device.h)
  /// Adapters are trained in place of the weights: new ones, drawn by `seed`, or those of a folder. At most
  /// one of the two is given.
  std::optional<LoraOptions> lora = {};
  std::filesystem::path adapter = {};
  bool trains_adapter() const { return lora || !adapter.empty(); }
  ObjectiveOptions objective;
  std::vector<MixSource> mix{};  // in place of the objective, where there are any
  OptimizerOptions optimizer;
  PlanOptions plan;
  // `costs` compares plans; without it, the costs of a common decoder do. `predicted_costs` predicts times
  // and memory, where it is given.
  std::optional<PlanCosts> costs, predicted_costs;
  bool freeze_pad_embedding = false;  // Decoder::freeze_pad_embedding
  bool log_grad_norms = false;        // metrics of the gradient norms of each kind of module (grad_norms.h)
  double learning_rate = 1e-5;
  SchedulerKind scheduler = SchedulerKind::kConstant;
  int64_t warmup_steps = 0;
  int64_t steps = 0;  // optimiser steps; 0: as many as `epochs` need
  int64_t epochs = 1;
  int64_t batch_size = 0;  // trajectories per optimiser step; 0: all
  Shuffle shuffle = Shuffle::kNone;
  uint64_t seed = 0;
  int64_t save_every = 0;  // steps between checkpoints; the last step is always saved
  bool resume = false;
  Profiler* profiler = nullptr;  // of one step of the run; what it found is a note
  int64_t profile_step = 0;      // its number; 0: the run's second step, or its only one
};

inline constexpr double kLargestLearningRate = 1e6;
inline constexpr int64_t kMostSteps = 1'000'000'000'000;  // also of epochs and of the warm-up

/// Describe options of a run. `schedules`: what changes from step to step as well, and metrics.
void add_run_options(TrainOptions* options, OptionList* list);
void add_step_options(TrainOptions* options, OptionList* list);
void add_optimizer_options(TrainOptions* options, OptionList* list, bool schedules);
void add_profile_step(TrainOptions* options, OptionList* list);

/// Throws InputError naming an option that is NaN, infinite or out of its range.
void check_train_options(const TrainOptions& options);

}  // namespace espalier
