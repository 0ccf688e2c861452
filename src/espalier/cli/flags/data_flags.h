// SPDX-License-Identifier: Apache-2.0
// Flags for data and models: which trajectories a command reads, and the summary that it prints of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/base/options.h"
#include "espalier/config/layer_spec.h"
#include "espalier/data/reader.h"
#include "espalier/objective/options.h"

namespace espalier::cli {

/// What a command uses trajectories for: determines the checks and the summary when they are read.
struct DataUse {
  int64_t vocab_size = 0;               // ids must be below it; 0: any
  int64_t max_position_embeddings = 0;  // longer trajectories get a warning; 0: any length
  int64_t num_layers = 0;
  RouterShape routers;                        // recorded routes must match it
  std::optional<ObjectiveOptions> objective;  // determines which fields are used; nullopt: all known ones
};

/// Reads the model's limits from the config.json of its folder, if `model` is not empty. Throws InputError if
/// the objective has router losses and the model has no routers.
DataUse data_use_of(const std::string& model,
                    const std::optional<ObjectiveOptions>& objective = std::nullopt);

struct DataFlags {
  std::vector<std::string> data;  // names and patterns
  bool skip_bad_rows = false;
  int64_t limit = 0;
  int64_t max_row_bytes = kDefaultLineBytes;
  std::string row_cache;  // a folder; "": that of the files; "off": rows stay in memory
  /// If not empty, `data` is a temporary file made of these, which are named in its place.
  std::vector<std::string> converted_from;

  void add(OptionList* list, bool required = true);

  /// Reads the files one after another, with a progress bar. Then prints on standard error which rows were
  /// skipped and a summary (data_summary).
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

/// Prints on standard error which tensors of a model's files the decoder does not use, if any. Throws if one
/// of them must not be ignored (carried_tensors).
void note_carried_tensors(const std::string& model);

}  // namespace espalier::cli
