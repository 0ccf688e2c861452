// SPDX-License-Identifier: Apache-2.0
// Predicts the seconds of a micro-batch from counts and rates: assumed, measured, or of a file.
#pragma once

#include <nlohmann/json.hpp>

#include <array>
#include <cstdint>
#include <filesystem>

#include "espalier/plan/cost_model.h"
#include "espalier/plan/loss_work.h"

namespace espalier {

/// The cost of a micro-batch's forward and backward passes is linear in these counts.
inline constexpr int kNumTimeFeatures = 6;
using TimeFeatures = std::array<double, kNumTimeFeatures>;

/// 1; layers; layer_tokens; pairs of all attention layers; attention layers x mask blocks; logit rows, for
/// frozen weights scaled to the number that takes as long with trained weights.
TimeFeatures time_features(const ModelCost& model, const Load& load);

struct TimeModel {
  ModelCost cost;
  TimeFeatures seconds{};   // per unit of each feature
  bool calibrated = false;  // measured on this machine, not assumed
};

/// A model from FLOPs at an assumed rate, with typical fixed costs of a few CPU cores or a data-centre GPU.
/// For comparing plans, not for predicting times.
enum class Processor { kCpu, kGpu };
TimeModel assumed_time_model(const ModelCost& model, Processor processor = Processor::kCpu);

/// Seconds of forward and backward, recomputation by `checkpoint_activations` included.
double predicted_seconds(const TimeModel& model, const Load& load,
                         CheckpointActivations checkpoint_activations);

/// Seconds of a forward pass alone, LM head included.
double predicted_forward_seconds(const TimeModel& model, const Load& load);

/// The times of one of so many ranks that compute every micro-batch together: it has an equal part of all but
/// the costs of micro-batches and layers.
TimeModel time_of_rank(TimeModel model, int64_t ranks);

/// Name of the file in the folder of a training run.
inline constexpr const char* kCostModelFile = "cost_model.json";

/// Rates, in seconds per unit of each of time_features, and whether they are built-in or measured. They read
/// back bitwise identical.
nlohmann::ordered_json cost_model_json(const TimeModel& model);

/// The rates of a JSON object from cost_model_json, for a model of this cost; other keys are ignored. Throws
/// InputError naming `file` for an unknown format version and for missing rates, or rates outside of 0 to 1e9
/// seconds.
TimeModel parse_cost_model(const nlohmann::json& json, const ModelCost& cost,
                           const std::filesystem::path& file);

/// parse_cost_model of a file. Throws InputError also if it is not JSON.
TimeModel read_cost_model(const std::filesystem::path& file, const ModelCost& cost);

}  // namespace espalier
