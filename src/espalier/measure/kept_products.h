// SPDX-License-Identifier: Apache-2.0
// The matrix products of a run on a CPU, kept in its cost model file, so that resuming is bitwise identical
// on another machine.
#pragma once

#include <filesystem>
#include <optional>

#include <nlohmann/json.hpp>

#include "espalier/ops/kernels/cpu/products/product_choice.h"

namespace espalier {

/// Adds the products to the JSON of a cost model (plan/cost_model_file.h), which is read as before.
void add_products(const ProductChoice& products, nlohmann::ordered_json* cost_model);

/// The products in such a file, where it has any. Throws InputError naming the file where it is not JSON or
/// has other products than add_products writes.
std::optional<ProductChoice> read_products(const std::filesystem::path& file);

}  // namespace espalier
