// SPDX-License-Identifier: Apache-2.0
// The choice of CPU matrix products of a training run, saved in its cost model file so that resuming on
// another machine is bitwise identical.
#pragma once

#include <filesystem>
#include <optional>

#include <nlohmann/json.hpp>

#include "espalier/ops/kernels/cpu/products/product_choice.h"

namespace espalier {

/// Adds the products to the JSON of a cost model (plan/cost_model_file.h), whose readers ignore them.
void add_products(const ProductChoice& products, nlohmann::ordered_json* cost_model);

/// The products in such a file, if it has any. Throws InputError naming the file if it is not JSON or has
/// products that add_products does not write.
std::optional<ProductChoice> read_products(const std::filesystem::path& file);

}  // namespace espalier
