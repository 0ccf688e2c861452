// SPDX-License-Identifier: Apache-2.0
// --data and what goes with it: which trajectories a command reads, and what it says about them first.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/base/options.h"
#include "espalier/config/router_shape.h"
#include "espalier/data/reader.h"
#include "espalier/objective/options.h"

namespace espalier::cli {

/// What a command is going to do with trajectories, as far as reading them is concerned.
struct DataUse {
  int64_t vocab_size = 0;               // ids must be below it; 0: any
  int64_t max_position_embeddings = 0;  // longer trajectories are told of; 0: any length
  int64_t num_layers = 0;
  RouterShape routers;                        // recorded routes must fit them
  std::optional<ObjectiveOptions> objective;  // which fields are used; nullopt: all that are known
};

/// By the config.json of a model folder; nothing is known of the model where `model` is empty. Throws
/// InputError where the objective has losses of routers and the model has none.
DataUse data_use_of(const std::string& model,
                    const std::optional<ObjectiveOptions>& objective = std::nullopt);

struct DataFlags {
  std::vector<std::string> data;  // names and patterns
  bool skip_bad_rows = false;
  int64_t limit = 0;
  int64_t max_row_bytes = kDefaultLineBytes;

  void add(OptionList* list, bool required = true);

  /// Reads the files, one after the other, with a progress bar. Then says on standard error what was read
  /// (data_summary), and which rows were skipped.
  Trajectories read(const DataUse& use) const;

  /// The files that names and patterns stand for.
  std::vector<std::filesystem::path> files() const;

  /// The value of --data that means the same files again, also when others match the patterns by then.
  nlohmann::ordered_json resolved() const;

  /// The files in a few words, without their folders.
  std::string title() const;
};

}  // namespace espalier::cli
