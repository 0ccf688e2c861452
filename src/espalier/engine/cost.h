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

/// What rows demand of the LM head beside the targets of terms.
struct HeadDemand {
  int64_t ref_topk = 0;         // Trajectories::ref_topk
  bool divides_logits = false;  // whether some Trajectories::logit_temperature is not 1
};
HeadDemand head_demand(const Trajectories& trajectories);

/// Memory model of a step with the config's decoder on a device, without optimiser state.
MemoryModel memory_model(const DecoderConfig& config, at::ScalarType dtype, const Objective& objective,
                         at::Device device = at::kCPU, const HeadDemand& demand = {});

/// The same for a loss and its trajectories; for a mix, the maximum over its sources.
MemoryModel memory_model(const DecoderConfig& config, at::ScalarType dtype, const Loss& loss,
                         at::Device device = at::kCPU);

/// The elementwise maximum of models that differ only in their objectives.
MemoryModel largest(std::span<const MemoryModel> models);

/// The cost of a decoder, including its adapter.
ModelCost cost_of(const Decoder& decoder);

/// assumed_time_model for the config on a device.
TimeModel assumed_times(const DecoderConfig& config, at::Device device);

}  // namespace espalier
