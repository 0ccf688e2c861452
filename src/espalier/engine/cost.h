// SPDX-License-Identifier: Apache-2.0
// What a decoder is predicted to take of time and memory.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <span>

#include "espalier/config/config.h"
#include "espalier/engine/step_cost.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/loss.h"
#include "espalier/plan/memory_model.h"
#include "espalier/plan/planner.h"

namespace espalier {

/// Bytes of a step with the config's decoder on a device, those of an optimiser left out. `ref_topk`:
/// tokens of a reference model that each term has (Trajectories::ref_topk).
MemoryModel memory_model(const DecoderConfig& config, at::ScalarType dtype, const Objective& objective,
                         at::Device device = at::kCPU, int64_t ref_topk = 0);

/// The same of a loss and its trajectories; of a mix, the most that any source needs.
MemoryModel memory_model(const DecoderConfig& config, at::ScalarType dtype, const Loss& loss,
                         at::Device device = at::kCPU);

/// The models of several objectives, which are alike else, as one that needs the most that any of them does.
MemoryModel largest(std::span<const MemoryModel> models);

/// What a decoder costs, its adapter included.
ModelCost cost_of(const Decoder& decoder);

/// assumed_time_model of the config on a device.
TimeModel assumed_times(const DecoderConfig& config, at::Device device);

}  // namespace espalier
