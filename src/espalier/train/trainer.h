// The training loop.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/data/trajectories.h"
#include "espalier/train/cost.h"
#include "espalier/train/engine.h"
#include "espalier/train/optimizer.h"
#include "espalier/train/profile.h"

namespace espalier {

/// In which order the trajectories are trained on in an epoch: as they stand, or shuffled by the seed, in
/// whole groups (equal group_id, kept together so that they share; a row without one is a group of its own)
/// or singly.
enum class Shuffle { kNone, kGroups, kRows };
Shuffle parse_shuffle(const std::string& name);

struct TrainOptions {
  std::filesystem::path model;
  std::filesystem::path out;
  at::ScalarType dtype = at::kFloat;
  at::ScalarType save_dtype = at::kFloat;
  at::Device device = at::kCPU;  // opened (ops/device.h)
  ObjectiveOptions objective;
  OptimizerOptions optimizer;
  PlanOptions plan;
  std::optional<PlanCosts> costs;  // plans are compared and predicted by these
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
  Profiler* profiler = nullptr;   // of one step of the run; what it found is a note
  int64_t profile_step = 0;       // its number; 0: the run's second step, or its only one
  nlohmann::ordered_json config;  // the resolved flags, kept in trainer_state.json and compared on resume
};

/// What a caller sees of a run while it goes on.
struct TrainEvents {
  /// Before the first step: total steps and the step resumed from.
  std::function<void(int64_t total_steps, int64_t resumed_step)> started;
  std::function<void(int64_t step, int64_t done, int64_t total)> micro_batch;
  std::function<void(int64_t step, const nlohmann::ordered_json& metrics)> step;
  /// After the first step, with costs: what was predicted of its micro-batches and what was measured.
  std::function<void(const Step& step, const StepPrediction& prediction, const StepResult& result)> predicted;
  std::function<void(const std::filesystem::path& folder)> saved;
  std::function<void(const std::string& text)> note;
};

/// Rows of every optimiser step of an epoch.
std::vector<std::vector<int64_t>> epoch_batches(const Trajectories& trajectories, const TrainOptions& options,
                                                int64_t epoch);

/// Number of optimiser steps that the options ask for.
int64_t total_steps(const Trajectories& trajectories, const TrainOptions& options);

/// Trains and writes checkpoints and metrics to options.out. Stops after the current step, with a checkpoint,
/// when *stop becomes true. Returns false if it was stopped before the last step.
/// A resumed run continues bit for bit: same flags, same data, same number of threads; on a device other than
/// the CPU, where that is deterministic. Another device may continue it.
bool train(const Trajectories& trajectories, const TrainOptions& options, const TrainEvents& events,
           const std::atomic<bool>* stop = nullptr);

}  // namespace espalier
