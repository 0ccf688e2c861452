// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/product_decision.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <fstream>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/json_file.h"
#include "espalier/measure/gemm_rates.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

// Identifies what a measurement is valid for.
nlohmann::ordered_json measurement_key(const ProductFeatures& features) {
  return {{"version", 1},
          {"cpu", device_name(at::kCPU)},
          {"features", describe(features)},
          {"instruction_set", static_cast<int>(features.isa)},
          {"threads", at::get_num_threads()}};
}

std::optional<ProductChoice> read_measurement(const std::filesystem::path& path,
                                              const nlohmann::ordered_json& key) {
  std::ifstream file(path);
  const auto json = nlohmann::ordered_json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("key", nlohmann::ordered_json()) != key) return std::nullopt;
  const auto text = json.value("products", nlohmann::ordered_json());
  if (!text.is_string()) return std::nullopt;
  try {
    return parse_product_choice(text.get<std::string>());
  } catch (const InputError&) {
    return std::nullopt;
  }
}

ProductChoice measured_before(const ProductFeatures& features, const std::filesystem::path& folder,
                              const auto& note, const auto& measure) {
  const nlohmann::ordered_json key = measurement_key(features);
  const auto path = folder / fmt::format("products-{:016x}.json", std::hash<std::string>{}(key.dump()));
  if (const auto choice = read_measurement(path, key)) return *choice;
  note(fmt::format("measuring which matrix products are fastest on this machine (once; kept in {})",
                   path.string()));
  const ProductChoice choice = measure();
  try {
    std::filesystem::create_directories(folder);
    write_text(path, nlohmann::ordered_json{{"key", key}, {"products", to_string(choice)}}.dump(2) + "\n");
  } catch (const std::exception& error) {
    note(fmt::format("the measurement could not be saved: {}", error.what()));
  }
  return choice;
}

constexpr const char* kProducts = "matrix_products";

}  // namespace

ProductChoice measure_products() {
  // The size of a small model's layer: larger than the caches, and takes a few milliseconds.
  const std::vector<LinearShape> shapes{{"of a layer", 512, 1024, 1024}};
  constexpr int kRounds = 9;
  constexpr double kWorthIt = 0.95;
  const std::vector<ProductWay> ways = product_ways();
  const std::vector<GemmRates> all = measure_gemm_rates(shapes, ways, kRounds);
  // The first way of a dtype is the default. A step takes all three products.
  const auto fastest_way = [&](at::ScalarType dtype) {
    const size_t first = std::ranges::find(ways, dtype, &ProductWay::dtype) - ways.begin();
    size_t best = first;
    double least = kWorthIt;
    for (size_t way = first + 1; way < ways.size(); ++way) {
      if (ways[way].dtype != dtype) continue;
      double ratio = 0;
      for (const GemmRates& rates : all) ratio += rates.ratio(way, first) / static_cast<double>(all.size());
      if (ratio < least) {
        best = way;
        least = ratio;
      }
    }
    return ways[best].choice;
  };
  return {fastest_way(at::kFloat).float32, fastest_way(at::kBFloat16).bfloat16};
}

ProductDecision decide_products(const ProductFeatures& features, const std::filesystem::path& folder,
                                const std::function<void(const std::string&)>& note,
                                const std::function<ProductChoice()>& measure) {
  const auto by_features = choose_by_features(features);
  const ProductChoice choice = by_features ? *by_features : measured_before(features, folder, note, measure);
  const ProductChoice named = with_environment(choice);
  return {named, named == choice
                     ? fmt::format("{}: {}", by_features ? "feature" : "measurement", describe(features))
                     : "the environment"};
}

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
