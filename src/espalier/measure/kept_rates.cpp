// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/kept_rates.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <fstream>
#include <system_error>
#include <tuple>

namespace espalier {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// Indices into TimeFeatures.
constexpr int kLayerTokens = 2, kPairs = 3, kLogitRows = 5;
constexpr const char* kRates = "flops_per_second";

struct NamedRate {
  const char* key;
  const char* text;
  std::optional<double> FlopRates::* rate;
};
constexpr NamedRate kNamedRates[] = {{"layers", "layers", &FlopRates::layers},
                                     {"attention", "attention", &FlopRates::attention},
                                     {"head", "LM head", &FlopRates::head}};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 16> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d", &parts);
  return text.data();
}

Json rates_json(const FlopRates& rates) {
  Json json = Json::object();
  for (const NamedRate& named : kNamedRates) {
    const std::optional<double>& rate = rates.*named.rate;
    json[named.key] = rate ? Json(*rate) : Json();
  }
  return json;
}

// Throws nlohmann's errors if a field is missing or has another type.
KeptRates read_rates(const Json& json) {
  const Json& key = json.at("key");
  KeptRates kept{.is_cpu = key.contains("cpu")};
  kept.device = key.at(kept.is_cpu ? "cpu" : "device").get<std::string>();
  if (kept.is_cpu) kept.threads = key.at("threads").get<int64_t>();
  kept.dtype = key.at("dtype").get<std::string>();
  kept.hidden_size = key.at("hidden_size").get<int64_t>();
  kept.vocab_size = key.at("vocab_size").get<int64_t>();
  kept.measured = json.at("measured").get<std::string>();
  for (const NamedRate& named : kNamedRates) {
    const Json& rate = json.at(kRates).at(named.key);
    if (!rate.is_null()) kept.rates.*named.rate = rate.get<double>();
  }
  return kept;
}

}  // namespace

FlopRates flop_rates(const TimeModel& model) {
  const ModelCost& cost = model.cost;
  const auto rate = [&](int feature, double flops) {
    const double seconds = model.seconds.at(feature);
    return seconds > 0 && flops > 0 ? std::optional(flops / seconds) : std::nullopt;
  };
  const Work pair{.pairs = 1, .window_pairs = std::vector<int64_t>(cost.sliding_windows().size(), 1)};
  return {
      .layers = rate(kLayerTokens, (6 * cost.weights() + 8 * cost.recurrence()) / cost.num_layers()),
      .attention = rate(kPairs, step_flops(cost, pair).attention / std::max(1.0, cost.attention_layers())),
      .head = rate(kLogitRows, step_flops(cost, {.logit_rows = 1}).head)};
}

nlohmann::ordered_json rates_to_keep(const TimeModel& model) {
  return {{"measured", today()}, {kRates, rates_json(flop_rates(model))}};
}

std::vector<KeptRates> kept_rates(const fs::path& folder) {
  std::vector<KeptRates> all;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const fs::path& path = entry.path();
    if (!path.filename().string().starts_with("calibration-") || path.extension() != ".json") continue;
    std::ifstream file(path);
    const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
    try {
      all.push_back(read_rates(json));
    } catch (const Json::exception&) {  // NOLINT(bugprone-empty-catch)
    }
  }
  const auto order = [](const KeptRates& kept) {
    return std::tie(kept.device, kept.dtype, kept.hidden_size, kept.vocab_size, kept.threads, kept.measured);
  };
  std::ranges::sort(all, [&](const KeptRates& a, const KeptRates& b) { return order(a) < order(b); });
  return all;
}

std::string to_string(const KeptRates& kept) {
  double largest = 0;
  for (const NamedRate& named : kNamedRates)
    largest = std::max(largest, (kept.rates.*named.rate).value_or(0));
  const bool tera = largest >= 1e13;
  std::vector<std::string> rates;
  for (const NamedRate& named : kNamedRates) {
    const std::optional<double>& rate = kept.rates.*named.rate;
    if (rate) rates.push_back(fmt::format("{} {:.1f}", named.text, *rate / (tera ? 1e12 : 1e9)));
  }
  const std::string threads = kept.is_cpu ? fmt::format("{} threads, ", kept.threads) : "";
  return fmt::format("{}, hidden size {}: {} {} ({}{})", kept.dtype, kept.hidden_size, fmt::join(rates, ", "),
                     tera ? "TFLOP/s" : "GFLOP/s", threads, kept.measured);
}

nlohmann::ordered_json to_json(const KeptRates& kept) {
  Json json = {{"dtype", kept.dtype}, {"hidden_size", kept.hidden_size}, {"vocab_size", kept.vocab_size}};
  if (kept.is_cpu) json["threads"] = kept.threads;
  json["measured"] = kept.measured;
  json[kRates] = rates_json(kept.rates);
  return json;
}

}  // namespace espalier
