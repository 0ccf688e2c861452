// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/kept_products.h"

#include "espalier/base/check.h"
#include "espalier/base/json_file.h"

namespace espalier {
namespace {

constexpr const char* kProducts = "matrix_products";

}  // namespace

void add_products(const ProductChoice& products, nlohmann::ordered_json* cost_model) {
  (*cost_model)[kProducts] = to_string(products);
}

std::optional<ProductChoice> read_products(const std::filesystem::path& file) {
  const auto json = read_json_file<nlohmann::json>(file);
  if (!json.is_object() || !json.contains(kProducts)) return std::nullopt;
  ESPALIER_CHECK(json[kProducts].is_string(), "{}: {}: expected a string, received {}", file.string(),
                 kProducts, json[kProducts].dump());
  try {
    return parse_product_choice(json[kProducts].get<std::string>());
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", file.string(), error.what()));
  }
}

}  // namespace espalier
