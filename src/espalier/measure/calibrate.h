// SPDX-License-Identifier: Apache-2.0
// Calibration: a short measurement of how fast this machine runs a model, cached in a folder.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <functional>
#include <string>

#include "espalier/config/config.h"
#include "espalier/plan/time_model.h"

namespace espalier {

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
