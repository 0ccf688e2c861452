// SPDX-License-Identifier: Apache-2.0
// What calibrations that are kept (calibrate.h) say of a device, in FLOPs per second.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/plan/time_model.h"

namespace espalier {

/// FLOPs per second of forward and backward (counted as in plan/cost_model.h). Nothing where the measurement
/// gave a part no time of its own.
struct FlopRates {
  std::optional<double> layers{};  // linear maps and recurrences, norms and the like included
  std::optional<double> attention{};
  std::optional<double> head{};
};
FlopRates flop_rates(const TimeModel& model);

struct KeptRates {
  std::string device{};  // its name (runtime/device.h)
  bool is_cpu = false;
  int64_t threads = 0;      // of a CPU
  std::string dtype{};      // "bfloat16"
  int64_t hidden_size = 0;  // of the model that was measured
  int64_t vocab_size = 0;
  std::string measured{};  // the day in UTC, "2026-11-23"
  FlopRates rates{};
};

/// Of all calibrations in `folder`, by device, dtype and sizes. Files that cannot be read are passed over,
/// and so are those that were written before rates were.
std::vector<KeptRates> kept_rates(const std::filesystem::path& folder);

/// What cached_calibration writes beside a key and seconds, to be read again by kept_rates: the day and the
/// rates.
nlohmann::ordered_json rates_to_keep(const TimeModel& model);

/// "float32, hidden size 576: layers 52.1, attention 20.3, LM head 40.0 GFLOP/s (2 threads, 2026-11-23)".
std::string to_string(const KeptRates& kept);

/// For JSON of commands: all of it, rates in FLOPs per second or null.
nlohmann::ordered_json to_json(const KeptRates& kept);

}  // namespace espalier
