// SPDX-License-Identifier: Apache-2.0
// Flags for data and models: which trajectories a command reads, and what it says of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/base/options.h"
#include "espalier/config/layer_spec.h"
#include "espalier/data/fields.h"
#include "espalier/data/reader.h"
#include "espalier/objective/options.h"

namespace espalier::commands {

/// What a command uses trajectories for: determines the checks and the summary when they are read.
struct DataUse {
  int64_t vocab_size = 0;               // ids must be below it; 0: any
  int64_t max_position_embeddings = 0;  // longer trajectories get a warning; 0: any length
  int64_t num_layers = 0;
  RouterShape routers;      // recorded routes must match it
  std::string objective{};  // its name; "": none, which uses all known fields
  /// Whether the objective uses a field of the rows (data_fields in objective/objective.h).
  std::function<bool(Field)> reads{};
  /// What makes the gradient weaker than one may expect, a line each (objective/signal.h).
  std::function<std::vector<std::string>(const Trajectories&)> warnings{};
};

/// Reads the model's limits from the config.json of its folder, if `model` is not empty.
DataUse data_use_of(const std::string& model);

/// The same for an objective. Throws InputError if it has router losses and the model has no routers.
DataUse data_use_of(const std::string& model, const ObjectiveOptions& objective);

struct DataFlags {
  std::vector<std::string> data;  // names and patterns
  bool skip_bad_rows = false;
  int64_t limit = 0;
  int64_t max_row_bytes = kDefaultLineBytes;
  std::string row_cache;  // a folder; "": that of the files; "off": rows stay in memory
  /// If not empty, `data` is a temporary file made of these, which are named in its place.
  std::vector<std::string> converted_from;

  void add(OptionList* list, bool required = true);

  /// Reads the files one after another, and tells how far it is. Then says which rows were skipped, and a
  /// summary (data_summary).
  Trajectories read(const DataUse& use) const;

  /// Where rows of several sets go that are put together, temporarily: beside the index.
  RowStore store() const;

  /// The files that the names and patterns match.
  std::vector<std::filesystem::path> files() const;

  /// A value of --data that names the same files, even if other files match the patterns later.
  nlohmann::ordered_json resolved() const;

  /// A short list of the files, without their folders.
  std::string title() const;

 private:
  std::vector<std::filesystem::path> named_files() const;
  std::string name() const;  // in messages about all rows
  Trajectories read_rows(const ReadOptions& options, ReadReport* report) const;
};

/// Adds --model, which is required unless `help` says what is used without it.
void add_model(OptionList* list, std::string* model, const std::string& help = "");

/// Adds --profile; `which` names the step that it records.
void add_profile(OptionList* list, std::string* trace, const std::string& which);

/// Says which tensors of a model's files the decoder does not use, if any. Throws if one
/// of them must not be ignored (carried_tensors).
void note_carried_tensors(const std::string& model);

}  // namespace espalier::commands
