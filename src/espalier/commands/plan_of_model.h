// SPDX-License-Identifier: Apache-2.0
// `plan`, and the part of it that needs LibTorch: the plan of a model.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/commands/command.h"
#include "espalier/commands/data_flags.h"
#include "espalier/engine/step_cost.h"
#include "espalier/measure/device_flags.h"
#include "espalier/measure/planning.h"
#include "espalier/train/flags.h"

namespace espalier::commands {

struct PlanArguments {
  DataFlags data;
  Planning planning;
  DeviceFlags device;
  LoraFlags lora;
  std::string model, save_cost_model;
  std::string_view dtype = "float32";
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  int64_t ranks = 0, context_parallel = 1;
  double link_bandwidth = 0;  // GB/s
  bool micro_batches = false, json = false;
};

/// The plan chosen for a model, and the rates of the predicted times.
struct ModelPlan {
  ComparedStep compared;
  std::vector<std::optional<StepPrediction>> predictions;  // by candidate
  TimeModel rates;
  ModelCost cost;
  double reduced_bytes = 0;            // of all gradients
  double context_bytes_per_token = 0;  // of keys and values
  /// Predicted peak bytes of one of --ranks processes that has these rows, none among them, together with
  /// others of `context_parallel` processes.
  std::function<double(const std::vector<int64_t>& rows, int64_t context_parallel)> rank_bytes;
};

/// `note` receives lines about what is being measured.
using ModelPlanner = std::function<ModelPlan(const Trajectories& trajectories, StepOptions options,
                                             const PlanProgress& progress,
                                             const std::function<void(const std::string&)>& note)>;

/// What `plan` needs of LibTorch; empty without.
struct PlanTools {
  /// Opens the device of the flags. The planner plans for their model on it; the flags must outlive it.
  std::function<ModelPlanner(const PlanArguments& flags)> planner_of_model{};
  std::function<void(int)> set_threads = [](int) {};  // planning itself uses one
};

Command plan_command(const Caller& caller, const PlanTools& tools = {});

/// Those of LibTorch.
PlanTools plan_tools();

}  // namespace espalier::commands
