// SPDX-License-Identifier: Apache-2.0
// What a run keeps of the machine that it began on, as a file: the cost model that plans are compared by, and
// the matrix products. So resuming makes the same plans, and bitwise identical.
#pragma once

#include <filesystem>
#include <optional>

#include <nlohmann/json.hpp>

#include "espalier/ops/kernels/cpu/product_choice.h"
#include "espalier/plan/time_model.h"

namespace espalier {

/// Name of the file in a run's folder.
inline constexpr const char* kCostModelFile = "cost_model.json";

/// Rates, and whether they are built-in or measured. They read back bitwise identical. Of a run on a CPU also
/// its matrix products.
nlohmann::ordered_json cost_model_json(const TimeModel& model,
                                       const std::optional<ProductChoice>& products = {});

/// The rates of a JSON object that cost_model_json made, for a model of this cost. Throws InputError, naming
/// `file` and what was expected, for anything else: an unknown format version, missing, negative or not
/// finite rates.
TimeModel parse_cost_model(const nlohmann::json& json, const ModelCost& cost,
                           const std::filesystem::path& file);

/// The same from a file; one that is not JSON throws as well.
TimeModel read_cost_model(const std::filesystem::path& file, const ModelCost& cost);

/// The matrix products in such a file, where it has any. Throws InputError as read_cost_model does.
std::optional<ProductChoice> read_products(const std::filesystem::path& file);

}  // namespace espalier
