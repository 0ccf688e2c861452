// SPDX-License-Identifier: Apache-2.0
// Flags that several commands share: what they are called, what they mean, how they become options.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>
#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/cli/data_flags.h"
#include "espalier/config/config.h"
#include "espalier/config/lora.h"
#include "espalier/objective/objective.h"
#include "espalier/plan/planner.h"
#include "espalier/train/optimizer.h"
#include "espalier/train/train_options.h"

namespace espalier::cli {

struct DeviceFlags {
  std::string device = "cpu";
  bool deterministic = false;

  /// `trains`: --deterministic as well.
  void add(CLI::App* command, bool trains);
  /// Opens the device (runtime/device.h). Call before anything else of LibTorch.
  at::Device open() const;
};

inline constexpr int64_t kDefaultTokenBudget = 4096;

/// A model, and how it is run.
struct ModelUse {
  DecoderConfig config;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;            // open
  std::optional<OptimizerKind> optimizer;  // whose state counts as memory
  ObjectiveOptions objective{};
  std::vector<MixSource> mix{};       // in place of the objective, where there are any
  std::optional<LoraOptions> lora{};  // of adapters that are trained in place of the weights
  int64_t ref_topk = 0;               // of the trajectories

  /// With the adapters.
  ModelCost cost() const;
};

struct PlanFlags {
  std::string strategy = "auto";
  int64_t token_budget = 0;
  uint64_t memory_budget = 0;
  std::string checkpoint_activations = "auto";
  bool offload_context = false;
  bool no_calibration = false;
  std::string cost_model;  // a file; empty: built-in rates

  void add(CLI::App* command);
  /// Without a memory budget token budget 0 becomes kDefaultTokenBudget, or the longest trajectory if that is
  /// longer.
  PlanOptions options(const Trajectories& trajectories) const;
  /// What plans for a model are compared by. It never depends on a measurement of this machine, so equal
  /// flags and data give equal plans, and equal plans equal bits, however busy the machine is.
  PlanCosts costs(const ModelUse& use) const;
  /// The same with the time model that predictions are made by: rates measured on this device, unless
  /// --no-calibration. Measures when no calibration is kept, and tells `note`.
  PlanCosts measured_costs(const ModelUse& use, const std::function<void(const std::string&)>& note) const;
  /// Forgets the kept calibration where a step took much more or less time than it predicts, and tells
  /// `note`: it may have been measured while the machine was at something else.
  void judge_calibration(const ModelUse& use, double predicted_seconds, double measured_seconds,
                         const std::function<void(const std::string&)>& note) const;
};

/// What is not given follows from the objective (default_options).
struct ObjectiveFlags {
  std::string objective = "sft";
  std::string shared_targets = "sum";
  std::optional<std::string> normalize;
  std::optional<double> clip_low, clip_high;
  double dual_clip = 0;
  std::optional<std::string> baseline, scale_rewards;
  double turn_discount = 1;
  std::string importance_weights = "none", importance_level = "token";
  double importance_cap = 2, importance_floor = 0.5;
  double kl_coef = 0;
  std::string kl_estimator = "k3", kl_in = "loss";
  std::string ref_topk = "none";
  std::optional<double> beta;
  double margin = 1, chosen_weight = 1, rejected_weight = 1, entropy_coef = 0;
  bool log_entropy = false;
  double router_aux_loss_coef = 0;
  double router_z_loss_coef = 0;

  void add(CLI::App* command);
  /// Throws InputError where they do not fit one another (check_objective_options).
  ObjectiveOptions options() const;
  /// All of them, without dashes.
  static std::vector<std::string> names();
  /// The values of those flags whose default follows from the objective, for config.toml.
  nlohmann::ordered_json resolved() const;
};

struct OptimizerFlags {
  std::string optimizer = "adamw";
  double learning_rate = TrainOptions{}.learning_rate;
  std::string scheduler = "constant";
  int64_t warmup_steps = 0;
  bool log_grad_norms = false;
  OptimizerOptions rest{};  // without its kind

  /// `schedules`: --scheduler, --warmup-steps and --log-grad-norms as well.
  void add(CLI::App* command, bool schedules);
  OptimizerOptions options() const;
  void apply_to(TrainOptions* options) const;
};

/// --dtype, --config, --json, --threads by the same words everywhere.
CLI::Option* add_model(CLI::App* command, std::string* model,
                       const std::string& help = "Hugging Face model folder");
CLI::Option* add_dtype(CLI::App* command, std::string* dtype, const std::string& help);
CLI::Option* add_freeze_pad_embedding(CLI::App* command, bool* freeze);
void add_config(CLI::App* command);
void add_threads(CLI::App* command);

/// Says on standard error which tensors of a model's files are none of the decoder's, if any. Throws where
/// one of them must not be passed over (carried_tensors).
void note_carried_tensors(const std::string& model);

/// --profile; `which`: the step that it records.
CLI::Option* add_profile(CLI::App* command, std::string* trace, const std::string& which);

}  // namespace espalier::cli
