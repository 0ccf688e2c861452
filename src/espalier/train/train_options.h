// SPDX-License-Identifier: Apache-2.0
// Options of a training run.
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
#include "espalier/distributed/group.h"
#include "espalier/engine/cost.h"
#include "espalier/measure/profile.h"
#include "espalier/objective/mix.h"
#include "espalier/objective/objective.h"
#include "espalier/train/optimizer/optimizer.h"

namespace espalier {

/// Order of trajectories in an epoch: file order, whole groups shuffled (equal group_id; a row without one is
/// a group), or single rows shuffled. Only kRows may split a group over steps: with kNone the rows of a group
/// follow its first one.
enum class Shuffle { kNone, kGroups, kRows };

struct TrainOptions {
  std::filesystem::path model;
  std::filesystem::path out;
  at::ScalarType dtype = at::kFloat;
  at::ScalarType save_dtype = at::kFloat;
  at::Device device = at::kCPU;  // opened (runtime/device.h)
  /// Adapters to train in place of the weights: new ones, initialised by `seed`, or loaded from a folder. At
  /// most one of the two may be set.
  std::optional<LoraOptions> lora = {};
  std::filesystem::path adapter = {};
  bool trains_adapter() const { return lora || !adapter.empty(); }
  ObjectiveOptions objective;
  std::vector<MixSource> mix{};  // if not empty, used in place of the objective
  OptimizerOptions optimizer;
  PlanOptions plan;
  // `costs`: for comparing plans; if unset, those of a typical decoder. `predicted_costs`: for predicting
  // times and memory; optional.
  std::optional<PlanCosts> costs, predicted_costs;
  bool freeze_pad_embedding = false;  // Decoder::freeze_pad_embedding
  bool log_grad_norms = false;        // report gradient norms by kind of module (optimizer.h)
  double learning_rate = 1e-5;
  SchedulerKind scheduler = SchedulerKind::kConstant;
  int64_t warmup_steps = 0;
  int64_t steps = 0;  // optimiser steps; 0: as many as `epochs` need
  int64_t epochs = 1;
  int64_t batch_size = 0;  // trajectories per optimiser step; 0: all
  Shuffle shuffle = Shuffle::kNone;
  uint64_t seed = 0;
  int64_t save_every = 0;  // steps between checkpoints; the last step is always saved
  /// Steps of the run whose loss or gradients are not finite, or whose update would overflow, that leave
  /// weights and optimiser as they are; one more is an error.
  int64_t skip_bad_steps = 0;
  bool save_in_background = false;        // checkpoints but the last (run/checkpoint.h)
  int64_t keep_last = 0;                  // newest checkpoints to keep; 0: all
  int64_t keep_every = 0;                 // also keep those of steps that are multiples of it; 0: none
  std::filesystem::path follow = {};      // folder of files to train on as they come; empty: none
  int64_t follow_files = 1;               // as many are taken together
  std::string publish_command = {};       // run with each published folder as its last argument; "": none
  std::filesystem::path publish = {};     // folder for weights without training state; empty: none
  int64_t publish_every = 1;              // steps between them; those of the last step are always published
  std::filesystem::path rescue_dir = {};  // for checkpoints that cannot be written to `out`; empty: none
  bool resume = false;
  Profiler* profiler = nullptr;   // profiles one step; the summary is a note
  int64_t profile_step = 0;       // number of that step; 0: the second step, or the only one
  const Group* group = &alone();  // the ranks that train together, with equal options; outlives the run
  /// Successive ranks of the group that compute every micro-batch together (engine/share.h); null: each its
  /// own.
  const Group* context_group = nullptr;
};

inline constexpr double kLargestLearningRate = 1e6;
inline constexpr int64_t kMostSteps = 1'000'000'000'000;  // also the limit of epochs and warm-up steps

/// Add options of a run to `list`. `schedules`: also those of learning rate schedules and metrics.
void add_run_options(TrainOptions* options, OptionList* list);
void add_step_options(TrainOptions* options, OptionList* list);
void add_optimizer_options(TrainOptions* options, OptionList* list, bool schedules);
void add_profile_step(TrainOptions* options, OptionList* list);

/// Throws InputError naming an option that is NaN, infinite or out of its range.
void check_train_options(const TrainOptions& options);

}  // namespace espalier
