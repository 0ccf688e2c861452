// Flags that several commands share: what they are called, what they mean, how they become options.
#pragma once

#include <ATen/core/ScalarType.h>
#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>

#include "espalier/data/reader.h"
#include "espalier/plan/plan.h"
#include "espalier/train/objective.h"

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

inline constexpr int64_t kDefaultTokenBudget = 4096;

struct PlanFlags {
  std::string strategy = "tree-packing";
  int64_t token_budget = 0;

  void add(CLI::App* command);
  /// With the token budget that 0 stands for: kDefaultTokenBudget, or the longest trajectory if that is
  /// longer.
  PlanOptions options(const Trajectories& trajectories) const;
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

/// vocab_size of a model folder; 0 when `model` is empty.
int64_t vocab_size_of(const std::string& model);

}  // namespace espalier::cli
