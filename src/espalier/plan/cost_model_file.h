// SPDX-License-Identifier: Apache-2.0
// Files of time models. `plan --save-cost-model` writes measured rates. A training run stores the rates by
// which its plans are compared, so that resuming makes the same plans and the Python package predicts the
// same seconds.
#pragma once

#include <filesystem>

#include <nlohmann/json.hpp>

#include "espalier/plan/time_model.h"

namespace espalier {

/// Name of the file in the folder of a training run.
inline constexpr const char* kCostModelFile = "cost_model.json";

/// Rates, in seconds per unit of each of time_features, and whether they are built-in or measured. They read
/// back bitwise identical.
nlohmann::ordered_json cost_model_json(const TimeModel& model);

/// The rates of a JSON object from cost_model_json, for a model of this cost; other keys are ignored. Throws
/// InputError naming `file` for an unknown format version and for missing rates, or rates outside of 0 to 1e9
/// seconds.
TimeModel parse_cost_model(const nlohmann::json& json, const ModelCost& cost,
                           const std::filesystem::path& file);

/// parse_cost_model of a file. Throws InputError also if it is not JSON.
TimeModel read_cost_model(const std::filesystem::path& file, const ModelCost& cost);

}  // namespace espalier
