// SPDX-License-Identifier: Apache-2.0
// Calibration: a short measurement of how fast this machine runs a model, cached in a folder.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "espalier/config/config.h"
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

/// All fields as JSON for commands; rates in FLOPs per second or null.
nlohmann::ordered_json to_json(const KeptRates& kept);

/// Measures forward and backward of micro-batches of different shapes through models of one and of three
/// layers with the config's sizes and random weights, and fits the non-negative coefficients of the time
/// model by least squares of relative errors, using the faster of two repetitions each. Takes seconds, and
/// the memory for training three layers with embedding.
TimeModel calibrate(const DecoderConfig& config, at::ScalarType dtype, at::Device device = at::kCPU);

/// Reads the calibration for this device (its name; on a CPU also the number of threads), the model sizes and
/// dtype from `folder`; if it is missing or unreadable, measures and saves it. `note` is called before
/// measuring, and with a warning if the result cannot be saved; it is returned nevertheless.
TimeModel cached_calibration(const DecoderConfig& config, at::ScalarType dtype, at::Device device,
                             const std::filesystem::path& folder,
                             const std::function<void(const std::string&)>& note = {});

/// Removes a calibration from `folder`. Returns whether there was one.
bool forget_calibration(const DecoderConfig& config, at::ScalarType dtype, at::Device device,
                        const std::filesystem::path& folder);

/// $XDG_CACHE_HOME/espalier or ~/.cache/espalier.
std::filesystem::path cache_folder();

}  // namespace espalier
