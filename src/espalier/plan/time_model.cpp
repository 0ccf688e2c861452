// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/time_model.h"

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/base/json_file.h"

namespace espalier {
namespace {

/// The work of the LM head relative to one whose weight is trained: without the weight's gradient, 3 of 4
/// products.
double head_share(const ModelCost& model) {
  return model.frozen ? 0.75 : 1;
}

struct Rates {
  double flops_per_second;
  double bytes_per_second;
  double seconds_per_mask_block;  // of attention
  double seconds_per_layer;       // to launch its operators
};
constexpr Rates kCpuRates = {1e11, 1e10, 80e-6, 0};
// Half the rate of bfloat16 products on a Hopper, its memory bandwidth, and about 40 launches of 5 us per
// layer.
constexpr Rates kGpuRates = {3e14, 3e12, 1e-6, 200e-6};

// The share of the forward pass in forward and backward: of the layers, by FLOPs; of mask blocks as measured;
// of the LM head by FLOPs.
constexpr double kLinearForward = 2.0 / 6, kAttentionForward = 4.0 / 14, kMaskBlockForward = 3.0 / 8,
                 kHeadForward = 2.0 / 8;

TimeFeatures layers_forward(const ModelCost& model) {
  const Work token{.tokens = 1, .logit_rows = 1};
  const double linear =
      model.frozen ? forward_flops(model, token).linear / step_flops(model, token).linear : kLinearForward;
  return {0, 0, linear, kAttentionForward, kMaskBlockForward, 0};
}

constexpr int64_t kFormatVersion = 1;
constexpr double kMostSeconds = 1e9;  // so that those of a step stay finite
constexpr const char* kBuiltIn = "built-in";
constexpr const char* kMeasured = "measured";

// In the order of time_features.
constexpr const char* kRates[kNumTimeFeatures] = {
    "micro_batch", "layer", "layer_token", "layer_pair", "layer_attention_piece", "logit_row"};

}  // namespace

TimeFeatures time_features(const ModelCost& model, const Load& load) {
  const double pairs =
      weighted_pairs(model, load.pairs, load.window_pairs, [](const LayerCost&) { return int64_t{1}; });
  return {1,
          model.num_layers(),
          layer_tokens(model, {.tokens = load.tokens, .logit_rows = load.logit_rows}),
          pairs,
          model.attention_layers() * static_cast<double>(load.mask_blocks),
          static_cast<double>(load.logit_rows) * head_share(model)};
}

TimeModel assumed_time_model(const ModelCost& model, Processor processor) {
  const Rates& rates = processor == Processor::kCpu ? kCpuRates : kGpuRates;
  const auto seconds_of = [&](double flops) { return flops / rates.flops_per_second; };
  // Weights are read in both passes, and their gradient sums read and written, once per micro-batch.
  const double embedding = 4.0 * static_cast<double>(model.vocab_size * model.hidden_size);
  const double layer = model.weights() / model.num_layers();
  const double stored = model.stored_weights() / model.num_layers();
  const double attention_layers = std::max(1.0, model.attention_layers());
  const Work pair{.pairs = 1, .window_pairs = std::vector<int64_t>(model.sliding_windows().size(), 1)};
  return {model,
          {4 * embedding / rates.bytes_per_second,
           3 * 4 * stored / rates.bytes_per_second + rates.seconds_per_layer,
           seconds_of(6 * layer + 8 * model.recurrence() / model.num_layers()),
           seconds_of(step_flops(model, pair).attention) / attention_layers, rates.seconds_per_mask_block,
           seconds_of(step_flops(model, {.logit_rows = 1}).head)}};
}

TimeModel time_of_rank(TimeModel model, int64_t ranks) {
  constexpr size_t kFixed = 2;  // of a micro-batch, of a layer
  for (size_t i = kFixed; i < model.seconds.size(); ++i) model.seconds[i] /= static_cast<double>(ranks);
  return model;
}

double predicted_seconds(const TimeModel& model, const Load& load,
                         CheckpointActivations checkpoint_activations) {
  // Recomputation adds one more forward pass of the layers.
  const bool again = checkpoint_activations == CheckpointActivations::kLayer ||
                     (checkpoint_activations == CheckpointActivations::kPiece && load.has_readers());
  const TimeFeatures features = time_features(model.cost, load), forward = layers_forward(model.cost);
  double seconds = 0;
  for (int i = 0; i < kNumTimeFeatures; ++i) {
    seconds += model.seconds[i] * features[i] * (again ? 1 + forward[i] : 1);
  }
  return seconds;
}

double predicted_forward_seconds(const TimeModel& model, const Load& load) {
  // Of the fixed costs of a micro-batch and a layer, the forward pass has one of three reads of the weights.
  TimeFeatures share = layers_forward(model.cost);
  share[0] = share[1] = 1.0 / 3;
  share[kNumTimeFeatures - 1] = kHeadForward / head_share(model.cost);
  const TimeFeatures features = time_features(model.cost, load);
  double seconds = 0;
  for (int i = 0; i < kNumTimeFeatures; ++i) seconds += model.seconds[i] * features[i] * share[i];
  return seconds;
}

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
