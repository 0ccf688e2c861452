// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/cost_model_file.h"

#include "espalier/base/check.h"
#include "espalier/base/json_file.h"

namespace espalier {
namespace {

constexpr int64_t kFormatVersion = 1;
constexpr double kMostSeconds = 1e9;  // so that those of a step stay finite
constexpr const char* kBuiltIn = "built-in";
constexpr const char* kMeasured = "measured";

// In the order of time_features.
constexpr const char* kRates[kNumTimeFeatures] = {
    "micro_batch", "layer", "layer_token", "layer_pair", "layer_attention_piece", "logit_row"};

}  // namespace

nlohmann::ordered_json cost_model_json(const TimeModel& model) {
  nlohmann::ordered_json seconds;
  for (int i = 0; i < kNumTimeFeatures; ++i) seconds[kRates[i]] = model.seconds[i];
  return {{"format_version", kFormatVersion},
          {"origin", model.calibrated ? kMeasured : kBuiltIn},
          {"seconds_per", seconds}};
}

TimeModel parse_cost_model(const nlohmann::json& json, const ModelCost& cost,
                           const std::filesystem::path& file) {
  ESPALIER_CHECK(json.is_object(), "{}: expected a JSON object, a cost model written by espalier",
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
    const bool valid = rate.is_number() && rate.get<double>() >= 0 && rate.get<double>() <= kMostSeconds;
    ESPALIER_CHECK(valid, "{}: seconds_per.{}: expected a number of seconds from 0 to {:g}, received {}",
                   file.string(), kRates[i], kMostSeconds, rate.dump());
    model.seconds[i] = rate.get<double>();
  }
  return model;
}

TimeModel read_cost_model(const std::filesystem::path& file, const ModelCost& cost) {
  return parse_cost_model(read_json_file<nlohmann::json>(file), cost, file);
}

}  // namespace espalier
