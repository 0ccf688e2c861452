// SPDX-License-Identifier: Apache-2.0
// A time model as a file: `plan --save-cost-model` writes measured rates, and a run keeps those that its
// plans are compared by. So resuming makes the same plans, and the Python package predicts the same seconds.
#pragma once

#include <filesystem>

#include <nlohmann/json.hpp>

#include "espalier/plan/time_model.h"

namespace espalier {

/// Name of the file in a run's folder.
inline constexpr const char* kCostModelFile = "cost_model.json";

/// Rates, in seconds per unit of each of time_features, and whether they are built-in or measured. They read
/// back bitwise identical.
nlohmann::ordered_json cost_model_json(const TimeModel& model);

/// The rates of a JSON object that cost_model_json made, for a model of this cost; other keys are left alone.
/// Throws InputError, naming `file` and what was expected, for anything else: an unknown format version,
/// missing rates, negative ones, and those beyond 1e9 seconds.
TimeModel parse_cost_model(const nlohmann::json& json, const ModelCost& cost,
                           const std::filesystem::path& file);

/// The same from a file; one that is not JSON throws as well.
TimeModel read_cost_model(const std::filesystem::path& file, const ModelCost& cost);

}  // namespace espalier
