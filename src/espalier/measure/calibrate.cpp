// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/calibrate.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <numeric>
#include <system_error>
#include <tuple>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/rng.h"
#include "espalier/data/builder.h"
#include "espalier/engine/cost.h"
#include "espalier/engine/engine.h"
#include "espalier/model/weights/weights.h"
#include "espalier/ops/checks.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// Indices into TimeFeatures.
constexpr int kLayerTokens = 2, kPairs = 3, kLogitRows = 5;
constexpr const char* kRates = "flops_per_second";

struct NamedRate {
  const char* key;
  std::optional<double> FlopRates::* rate;
};
constexpr NamedRate kNamedRates[] = {
    {"layers", &FlopRates::layers}, {"attention", &FlopRates::attention}, {"head", &FlopRates::head}};

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

// A forest to measure: `chains` unrelated prompts, each continued by `leaves` branches; the last part of
// every trajectory carries loss.
struct Probe {
  int64_t chains, prompt, leaves, leaf;
  double loss_part;
};

std::vector<Probe> probes(int64_t tokens) {
  return {{1, tokens, 0, 0, 0.05},
          {1, tokens / 4, 0, 0, 0.4},
          {1, 2 * tokens, 0, 0, 0.01},
          {8, tokens / 8, 0, 0, 0.05},
          {1, tokens / 2, 32, std::max<int64_t>(1, tokens / 64), 0.1}};
}

Trajectories make_trajectories(const Probe& probe, int64_t vocab_size) {
  Rng rng(7, 0xCA1);
  TrajectoriesBuilder builder;
  const auto draw = [&](std::vector<int32_t>* ids, int64_t count) {
    for (int64_t i = 0; i < count; ++i) ids->push_back(static_cast<int32_t>(rng.below(vocab_size)));
  };
  for (int64_t chain = 0; chain < probe.chains; ++chain) {
    std::vector<int32_t> prompt{static_cast<int32_t>(chain % vocab_size)};
    draw(&prompt, probe.prompt - 1);
    for (int64_t leaf = 0; leaf < std::max<int64_t>(1, probe.leaves); ++leaf) {
      std::vector<int32_t> ids = prompt;
      draw(&ids, probe.leaf);
      const auto size = static_cast<int64_t>(ids.size());
      const int64_t first = size - static_cast<int64_t>(probe.loss_part * static_cast<double>(size));
      std::vector<double> weights(size);
      std::fill(weights.begin() + std::min(first, size - 1), weights.end(), 1.0);
      TrajectoryRow row;
      row.input_ids = std::move(ids);
      row.loss_weights = std::move(weights);
      builder.append(row);
    }
  }
  return builder.finish();
}

/// One layer of each kind.
std::vector<LayerSpec> kinds_of(const std::vector<LayerSpec>& layers) {
  std::vector<LayerSpec> kinds;
  for (const LayerSpec& layer : layers) {
    const auto is_same = [&](const LayerSpec& other) { return to_json(other) == to_json(layer); };
    if (std::ranges::none_of(kinds, is_same)) kinds.push_back(layer);
  }
  return kinds;
}

Decoder random_decoder(DecoderConfig config, int64_t num_hidden_layers, at::ScalarType dtype,
                       at::Device device) {
  // Where layers are a mixer or an MLP, one of each kind stands for a layer.
  if (!std::ranges::all_of(config.layers, &LayerSpec::has_mixer)) {
    config.layers = kinds_of(config.layers);
    num_hidden_layers *= config.num_hidden_layers();
  }
  // Take the last layers, since hybrid models have attention among them; repeat if there are too few.
  std::vector<LayerSpec> layers;
  for (int64_t place = 0; place < num_hidden_layers; ++place) {
    const int64_t all = config.num_hidden_layers();
    LayerSpec& layer = layers.emplace_back(config.layers[all - 1 - (num_hidden_layers - 1 - place) % all]);
    // Measure a model with experts by layers that have them.
    if (const MoeSpec* moe = config.moe(); moe != nullptr && layer.has_mixer() && layer.has_mlp())
      layer.mlp = *moe;
    // The time per visible pair does not depend on the window; without one there are more pairs to measure.
    if (auto* attention = std::get_if<AttentionSpec>(&layer.mixer)) attention->sliding_window = 0;
  }
  config.layers = std::move(layers);
  const auto generator = at::detail::createCPUGenerator(1);
  std::vector<Parameter> parameters;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    const bool is_matrix = parameter.shape.size() > 1;
    const at::Tensor value =
        at::empty(parameter.shape, dtype).normal_(is_matrix ? 0 : 1, is_matrix ? 0.02 : 0, generator);
    parameters.push_back({parameter.name, value.to(device).requires_grad_()});
  }
  return Decoder(config, std::move(parameters),
                 zero_buffers(config, detail::accumulator_dtype(dtype), device));
}

struct Sample {
  TimeFeatures features;
  double seconds;
};

void measure(const Decoder& decoder, const Probe& probe, std::vector<Sample>* samples) {
  constexpr int kRepeats = 2;
  const Trajectories trajectories = make_trajectories(probe, decoder.config().vocab_size);
  std::vector<int64_t> rows(trajectories.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  const Step step = make_step(trajectories, rows, {.plan = {Strategy::kTreePacking, 0}});
  decoder.zero_gradients();
  std::vector<double> seconds;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {  // the first is warm-up
    synchronize(decoder.device());
    const StepResult result = forward_backward(decoder, step, Loss(trajectories, ObjectiveOptions{}));
    if (repeat > 0) seconds.push_back(result.measured.at(0).seconds);
  }
  std::sort(seconds.begin(), seconds.end());
  const ModelCost model = model_cost(decoder.config());
  samples->push_back(
      {time_features(model, step_loads(step, model.sliding_windows()).at(0)), seconds.front()});
}

// Least squares of relative errors with coefficients >= 0, by coordinate descent.
TimeFeatures fit(const std::vector<Sample>& samples) {
  constexpr int kRounds = 20'000;
  TimeFeatures coefficients{};
  std::vector<double> residual(samples.size(), 1.0);  // of 1 = sum of coefficient * feature / seconds
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kNumTimeFeatures; ++i) {
      double along = 0, square = 0;
      for (size_t k = 0; k < samples.size(); ++k) {
        const double x = samples[k].features[i] / samples[k].seconds;
        along += x * residual[k];
        square += x * x;
      }
      if (square == 0) continue;
      const double change = std::max(-coefficients[i], along / square);
      coefficients[i] += change;
      for (size_t k = 0; k < samples.size(); ++k) {
        residual[k] -= change * samples[k].features[i] / samples[k].seconds;
      }
    }
  }
  return coefficients;
}

// Identifies what a calibration is valid for.
nlohmann::ordered_json key_of(const DecoderConfig& config, at::ScalarType dtype, at::Device device) {
  // The number of layers does not matter, because models of a few layers are measured.
  auto layers = nlohmann::ordered_json::array();
  for (const LayerSpec& layer : kinds_of(config.layers)) layers.push_back(to_json(layer));
  nlohmann::ordered_json key = {{"version", 5}};  // incremented when the engine becomes faster
  key[device.is_cpu() ? "cpu" : "device"] = device_name(device);
  if (device.is_cpu()) {
    key["threads"] = at::get_num_threads();
  } else {
    key["deterministic"] = at::globalContext().deterministicAlgorithms();
  }
  key.update({{"dtype", dtype_name(dtype)},
              {"hidden_size", config.hidden_size},
              {"vocab_size", config.vocab_size},
              {"tie_word_embeddings", config.tie_word_embeddings},
              {"layers", layers}});
  return key;
}

std::filesystem::path path_of(const nlohmann::ordered_json& key, const std::filesystem::path& folder) {
  return folder / fmt::format("calibration-{:016x}.json", std::hash<std::string>{}(key.dump()));
}

std::optional<TimeFeatures> read_calibration(const std::filesystem::path& path,
                                             const nlohmann::ordered_json& key) {
  std::ifstream file(path);
  const auto json = nlohmann::ordered_json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("key", nlohmann::ordered_json()) != key) return std::nullopt;
  const auto seconds = json.value("seconds", nlohmann::ordered_json());
  if (!seconds.is_array() || seconds.size() != kNumTimeFeatures) return std::nullopt;
  TimeFeatures features;
  for (int i = 0; i < kNumTimeFeatures; ++i) {
    if (!seconds[i].is_number() || seconds[i].get<double>() < 0) return std::nullopt;
    features[i] = seconds[i].get<double>();
  }
  return features;
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

nlohmann::ordered_json to_json(const KeptRates& kept) {
  Json json = {{"dtype", kept.dtype}, {"hidden_size", kept.hidden_size}, {"vocab_size", kept.vocab_size}};
  if (kept.is_cpu) json["threads"] = kept.threads;
  json["measured"] = kept.measured;
  json[kRates] = rates_json(kept.rates);
  return json;
}

TimeModel calibrate(const DecoderConfig& config, at::ScalarType dtype, at::Device device) {
  // About 20 GFLOP per layer on a CPU, 4 TFLOP on a GPU.
  const ModelCost cost = model_cost(config);
  const double per_token = 6 * cost.weights() / cost.num_layers();
  const double flops = device.is_cpu() ? 2e10 : 4e12;
  const int64_t least = device.is_cpu() ? 64 : 1024, most = device.is_cpu() ? 1024 : 16'384;
  const int64_t tokens = std::clamp<int64_t>(static_cast<int64_t>(flops / per_token), least, most) / 64 * 64;
  std::vector<Sample> samples;
  for (const int64_t layers : {1, 3}) {
    const Decoder decoder = random_decoder(config, layers, dtype, device);
    for (const Probe& probe : probes(tokens)) measure(decoder, probe, &samples);
  }
  return {cost, fit(samples), true};
}

TimeModel cached_calibration(const DecoderConfig& config, at::ScalarType dtype, at::Device device,
                             const std::filesystem::path& folder,
                             const std::function<void(const std::string&)>& note) {
  const nlohmann::ordered_json key = key_of(config, dtype, device);
  const auto path = path_of(key, folder);
  if (const auto seconds = read_calibration(path, key)) return {model_cost(config), *seconds, true};
  if (note)
    note(fmt::format("measuring how fast this machine runs the model (once; kept in {})", path.string()));
  const TimeModel model = calibrate(config, dtype, device);
  // The result is used even if it cannot be saved.
  try {
    std::filesystem::create_directories(folder);
    nlohmann::ordered_json kept{{"key", key}, {"seconds", model.seconds}};
    kept.update(rates_to_keep(model));
    write_text(path, kept.dump(2) + "\n");
  } catch (const std::exception& error) {
    if (note) note(fmt::format("warning: the measurement could not be saved: {}", error.what()));
  }
  return model;
}

bool forget_calibration(const DecoderConfig& config, at::ScalarType dtype, at::Device device,
                        const std::filesystem::path& folder) {
  std::error_code ignored;
  return std::filesystem::remove(path_of(key_of(config, dtype, device), folder), ignored);
}

std::filesystem::path cache_folder() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return std::filesystem::path(cache) / "espalier";
  }
  const char* home = std::getenv("HOME");
  return std::filesystem::path(home != nullptr && *home != '\0' ? home : ".") / ".cache" / "espalier";
}

}  // namespace espalier
