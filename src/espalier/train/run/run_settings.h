// SPDX-License-Identifier: Apache-2.0
// The options of a run that decide its weights, sorted by what a continuation may do with them.
#pragma once

#include <nlohmann/json.hpp>

#include "espalier/train/train_options.h"

namespace espalier {

/// Names and values under the options' names in messages. Options that are in neither object may change
/// freely: where files are, the device, how long the run is and how often it saves. So may a run's cost model
/// and matrix products, because the run reads its own (cost_model.json).
struct RunSettings {
  nlohmann::ordered_json fixed = nlohmann::ordered_json::object();  // have to stay as they are
  nlohmann::ordered_json adjustable =
      nlohmann::ordered_json::object();  // may change from here on, with a note

  bool operator==(const RunSettings&) const = default;
};

RunSettings run_settings(const TrainOptions& options);

}  // namespace espalier
