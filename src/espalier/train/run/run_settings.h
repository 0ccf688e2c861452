// SPDX-License-Identifier: Apache-2.0
// The options of a training run that affect its weights, by whether they may change on resume.
#pragma once

#include <nlohmann/json.hpp>

#include "espalier/train/train_options.h"

namespace espalier {

/// Values by option name. Options in neither object may change freely: file locations, device, number of
/// steps, checkpoint interval; also cost model and matrix products, which a run reads from its own
/// cost_model.json.
struct RunSettings {
  nlohmann::ordered_json fixed = nlohmann::ordered_json::object();       // must not change
  nlohmann::ordered_json adjustable = nlohmann::ordered_json::object();  // may change, with a note

  bool operator==(const RunSettings&) const = default;
};

RunSettings run_settings(const TrainOptions& options);

}  // namespace espalier
