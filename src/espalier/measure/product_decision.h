// SPDX-License-Identifier: Apache-2.0
// The choice of CPU matrix products at the start of a process.
#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "espalier/ops/kernels/cpu/products/product_choice.h"

namespace espalier {

/// Measures the fastest way for each dtype. Prefers LibTorch's (for bfloat16, upcast) unless another one
/// takes less than 0.95 of its time.
ProductChoice measure_products();

struct ProductDecision {
  ProductChoice choice;
  std::string reason;
};

/// Decides by the features of the processor where they suffice, otherwise by a measurement per processor,
/// number of threads and level, which is cached in `folder`. Compares medians of ratios over interleaved
/// rounds. `note` is called before measuring and if the result cannot be saved. The environment may override
/// the choice (with_environment).
ProductDecision decide_products(const ProductFeatures& features, const std::filesystem::path& folder,
                                const std::function<void(const std::string&)>& note,
                                const std::function<ProductChoice()>& measure = measure_products);

/// Adds the products to the JSON of a cost model (plan/time_model.h), whose readers ignore them.
void add_products(const ProductChoice& products, nlohmann::ordered_json* cost_model);

/// The products in such a file, if it has any. Throws InputError naming the file if it is not JSON or has
/// products that add_products does not write.
std::optional<ProductChoice> read_products(const std::filesystem::path& file);

}  // namespace espalier
