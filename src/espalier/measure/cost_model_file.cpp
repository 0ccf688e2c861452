// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/cost_model_file.h"

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/base/file.h"

namespace espalier {
namespace {

constexpr int64_t kFormatVersion = 1;
constexpr const char* kBuiltIn = "built-in";
constexpr const char* kMeasured = "measured";
constexpr const char* kProducts = "matrix_products";

// Of time_features, in their order.
constexpr const char* kRates[kNumTimeFeatures] = {
    "micro_batch", "layer", "layer_token", "layer_pair", "layer_attention_piece", "logit_row"};

nlohmann::json read_json(const std::filesystem::path& file) {
  auto json = nlohmann::json::parse(read_text(file), nullptr, /*allow_exceptions=*/false);
  ESPALIER_CHECK(!json.is_discarded(), "{}: expected JSON, a cost model that espalier wrote", file.string());
  return json;
}

}  // namespace

nlohmann::ordered_json cost_model_json(const TimeModel& model, const std::optional<ProductChoice>& products) {
  nlohmann::ordered_json seconds;
  for (int i = 0; i < kNumTimeFeatures; ++i) seconds[kRates[i]] = model.seconds[i];
  nlohmann::ordered_json json{{"format_version", kFormatVersion},
                              {"origin", model.calibrated ? kMeasured : kBuiltIn},
                              {"seconds_per", seconds}};
  if (products) json[kProducts] = to_string(*products);
  return json;
}

TimeModel parse_cost_model(const nlohmann::json& json, const ModelCost& cost,
                           const std::filesystem::path& file) {
  ESPALIER_CHECK(json.is_object(), "{}: expected a JSON object, a cost model that espalier wrote",
                 file.string());
  const nlohmann::json version = json.value("format_version", nlohmann::json());
  ESPALIER_CHECK(version == kFormatVersion, "{}: format_version: expected {}, received {}", file.string(),
                 kFormatVersion, version.dump());
  const nlohmann::json origin = json.value("origin", nlohmann::json());
  ESPALIER_CHECK(origin == kBuiltIn || origin == kMeasured, "{}: origin: expected `{}` or `{}`, received {}",
                 file.string(), kBuiltIn, kMeasured, origin.dump());
  const nlohmann::json seconds = json.value("seconds_per", nlohmann::json());
  ESPALIER_CHECK(seconds.is_object(), "{}: seconds_per: expected an object, received {}", file.string(),
                 seconds.dump());
  TimeModel model{.cost = cost, .seconds = {}, .calibrated = origin == kMeasured};
  for (int i = 0; i < kNumTimeFeatures; ++i) {
    const nlohmann::json rate = seconds.value(kRates[i], nlohmann::json());
    const bool valid = rate.is_number() && std::isfinite(rate.get<double>()) && rate.get<double>() >= 0;
    ESPALIER_CHECK(valid, "{}: seconds_per.{}: expected a number of seconds, at least 0, received {}",
                   file.string(), kRates[i], rate.dump());
    model.seconds[i] = rate.get<double>();
  }
  return model;
}

TimeModel read_cost_model(const std::filesystem::path& file, const ModelCost& cost) {
  return parse_cost_model(read_json(file), cost, file);
}

std::optional<ProductChoice> read_products(const std::filesystem::path& file) {
  const nlohmann::json json = read_json(file);
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
