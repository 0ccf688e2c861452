// SPDX-License-Identifier: Apache-2.0
// FLOPs per second of a device, from cached calibrations (calibrate.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/plan/time_model.h"

namespace espalier {

/// FLOPs per second of forward and backward (counted as in plan/cost_model.h). nullopt if the fit gave a part
/// a coefficient of 0.
struct FlopRates {
  std::optional<double> layers{};  // linear maps and recurrences, including norms and so on
  std::optional<double> attention{};
  std::optional<double> head{};
};
FlopRates flop_rates(const TimeModel& model);

struct KeptRates {
  std::string device{};  // its name (runtime/device.h)
  bool is_cpu = false;
  int64_t threads = 0;      // CPU only
  std::string dtype{};      // "bfloat16"
  int64_t hidden_size = 0;  // of the model that was measured
  int64_t vocab_size = 0;
  std::string measured{};  // the day in UTC, "2026-11-23"
  FlopRates rates{};
};

/// The rates of all calibrations in `folder`, by device, dtype and sizes. Skips files that cannot be read or
/// have no rates.
std::vector<KeptRates> kept_rates(const std::filesystem::path& folder);

/// The day and the rates, which cached_calibration saves for kept_rates.
nlohmann::ordered_json rates_to_keep(const TimeModel& model);

/// "float32, hidden size 576: layers 52.1, attention 20.3, LM head 40.0 GFLOP/s (2 threads, 2026-11-23)".
std::string to_string(const KeptRates& kept);

/// All fields as JSON for commands; rates in FLOPs per second or null.
nlohmann::ordered_json to_json(const KeptRates& kept);

}  // namespace espalier
