// Flags that several commands share: what they are called, what they mean, how they become options.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>
#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "espalier/data/reader.h"
#include "espalier/model/config.h"
#include "espalier/plan/planner.h"
#include "espalier/train/objective.h"
#include "espalier/train/optimizer.h"

namespace espalier::cli {

struct DataFlags {
  std::string data;
  bool skip_bad_rows = false;
  int64_t limit = 0;

  void add(CLI::App* command);
  /// Reads the file with a progress bar; skipped rows are reported on standard error. vocab_size 0: ids
  /// unchecked.
  Trajectories read(int64_t vocab_size) const;
};

struct DeviceFlags {
  std::string device = "cpu";
  bool deterministic = false;

  /// `trains`: --deterministic as well.
  void add(CLI::App* command, bool trains);
  /// Opens the device (ops/device.h). Call before anything else of LibTorch.
  at::Device open() const;
};

inline constexpr int64_t kDefaultTokenBudget = 4096;

/// A model, and how it is run.
struct ModelUse {
  DecoderConfig config;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;            // open
  std::optional<OptimizerKind> optimizer;  // whose state counts as memory
  ObjectiveKind objective = ObjectiveKind::kSft;
};

struct PlanFlags {
  std::string strategy = "auto";
  int64_t token_budget = 0;
  uint64_t memory_budget = 0;
  std::string checkpoint_activations = "auto";
  bool offload_context = false;
  bool no_calibration = false;

  void add(CLI::App* command);
  /// Without a memory budget token budget 0 becomes kDefaultTokenBudget, or the longest trajectory if that is
  /// longer.
  PlanOptions options(const Trajectories& trajectories) const;
  /// By what plans for a model are compared. Measures the device when no calibration is kept, and tells
  /// `note`.
  PlanCosts costs(const ModelUse& use, const std::function<void(const std::string&)>& note) const;
  /// Forgets the kept calibration where a step took much more or less time than it predicts, and tells
  /// `note`: it may have been measured while the machine was at something else.
  void judge_calibration(const ModelUse& use, double predicted_seconds, double measured_seconds,
                         const std::function<void(const std::string&)>& note) const;
};

struct ObjectiveFlags {
  std::string objective = "sft";
  std::string shared_targets = "sum";
  std::string normalize = "token";
  double clip_low = 0.2;
  double clip_high = 0.2;
  std::string scale_rewards = "group";

  void add(CLI::App* command);
  ObjectiveOptions options() const;
};

/// --dtype, --config, --json, --threads by the same words everywhere.
CLI::Option* add_model(CLI::App* command, std::string* model,
                       const std::string& help = "Hugging Face model folder");
CLI::Option* add_dtype(CLI::App* command, std::string* dtype, const std::string& help);
void add_config(CLI::App* command);
void add_threads(CLI::App* command);

/// --profile; `which`: the step that it records.
CLI::Option* add_profile(CLI::App* command, std::string* trace, const std::string& which);

/// vocab_size of a model folder; 0 when `model` is empty.
int64_t vocab_size_of(const std::string& model);

}  // namespace espalier::cli
