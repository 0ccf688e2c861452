// SPDX-License-Identifier: Apache-2.0
// How fast this machine runs a model: a short measured run, kept for the next time.
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
/// layers with the config's sizes and random weights, and fits the time model's seconds, none negative, to
/// the least squares of relative errors, of the faster of two runs each. Takes seconds; as much memory as
/// those three layers with embedding need in training.
TimeModel calibrate(const DecoderConfig& config, at::ScalarType dtype, at::Device device = at::kCPU);

/// The calibration of this device (its name; of a CPU also the number of threads), model sizes and dtype from
/// `folder`, or a new one, which is written there; a file that cannot be read is measured again. `note` says
/// when measuring begins, and warns when the folder cannot be written: the result is returned all the same.
TimeModel cached_calibration(const DecoderConfig& config, at::ScalarType dtype, at::Device device,
                             const std::filesystem::path& folder,
                             const std::function<void(const std::string&)>& note = {});

/// Has cached_calibration measure again the next time. Returns whether there was one in `folder`.
bool forget_calibration(const DecoderConfig& config, at::ScalarType dtype, at::Device device,
                        const std::filesystem::path& folder);

/// $XDG_CACHE_HOME/espalier or ~/.cache/espalier.
std::filesystem::path cache_folder();

}  // namespace espalier
