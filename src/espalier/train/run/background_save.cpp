// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/background_save.h"

#include <ATen/ATen.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

namespace espalier {
namespace {

std::vector<Parameter> copies_of(const std::vector<Parameter>& parameters, at::Device device) {
  std::vector<Parameter> copies = parameters;
  for (Parameter& copy : copies)
    copy.value = copy.value.detach().to(device, copy.value.scalar_type(), false, true);
  return copies;
}

}  // namespace

Decoder copy_of(const Decoder& decoder) {
  if (decoder.has_adapter()) {
    Adapter adapter = decoder.adapter();
    adapter.parameters = copies_of(adapter.parameters, decoder.device());
    return Decoder(decoder.config(), decoder.weights(), decoder.buffers(), std::move(adapter));
  }
  return Decoder(decoder.config(), copies_of(decoder.weights(), at::kCPU),
                 copies_of(decoder.buffers(), at::kCPU));
}

double state_bytes(const TrainOptions& options, at::ScalarType dtype, at::Device device) {
  const OptimizerKind kind = options.optimizer.kind;
  const double own = optimizer_bytes(kind, dtype, options.group->size());
  if (!options.save_in_background || !device.is_cpu()) return own;
  return own + optimizer_bytes(kind, dtype) + static_cast<double>(c10::elementSize(dtype));
}

void BackgroundSave::start(const CheckpointOptions& options, const Decoder& decoder,
                           OptimizerState* optimizer, const RunState& state) {
  const at::NoGradGuard no_grad;
  // One after the other, so that tensors that were made for it go at once.
  for (Parameter& entry : *optimizer)
    entry.value = entry.value.to(at::kCPU, entry.value.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  step_ = state.step;
  writing_ = std::async(std::launch::async, [options, state, copy = copy_of(decoder), moments = *optimizer] {
    const at::NoGradGuard no_grad;
    return save_checkpoint(options, copy, moments, state);
  });
}

bool BackgroundSave::is_done() const {
  return is_pending() && writing_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace espalier
