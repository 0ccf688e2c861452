// Seconds of a micro-batch, from counts and from rates that were measured or assumed.
#pragma once

#include <array>
#include <cstdint>

#include "espalier/plan/cost_model.h"
#include "espalier/plan/load.h"

namespace espalier {

/// What forward and backward of a micro-batch cost is linear in these counts.
inline constexpr int kNumTimeFeatures = 6;
using TimeFeatures = std::array<double, kNumTimeFeatures>;

/// 1; layers; layer_tokens; layers x pairs; layers x attention pieces; head rows.
TimeFeatures time_features(const ModelShape& shape, const Load& load);

struct TimeModel {
  ModelShape shape;
  TimeFeatures seconds{};   // per unit of each feature
  bool calibrated = false;  // measured on this machine, not assumed
};

/// From FLOPs at an assumed rate, with fixed costs of the usual size for a few CPU cores or for a data-centre
/// GPU: good for comparing plans, not for telling time.
enum class Processor { kCpu, kGpu };
TimeModel assumed_time_model(const ModelShape& shape, Processor processor = Processor::kCpu);

/// Seconds of forward and backward, recomputation by `checkpoint_activations` included.
double predicted_seconds(const TimeModel& model, const Load& load,
                         CheckpointActivations checkpoint_activations);

}  // namespace espalier
