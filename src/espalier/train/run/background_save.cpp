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

struct Snapshot {
  Snapshot(const CheckpointOptions& options, const Decoder& decoder, const Optimizer& optimizer,
           const RunState& state)
      : options(options),
        decoder(copy_of(decoder)),
        optimizer(optimizer.copy_for(this->decoder)),
        state(state) {}

  CheckpointOptions options;
  Decoder decoder;
  Optimizer optimizer;
  RunState state;
};

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

int64_t state_bytes(const TrainOptions& options, at::Device device) {
  const int64_t own = optimizer_bytes(options.optimizer.kind, options.dtype);
  if (!options.save_in_background || !device.is_cpu()) return own;
  return 2 * own + static_cast<int64_t>(c10::elementSize(options.dtype));
}

void BackgroundSave::start(const CheckpointOptions& options, const Decoder& decoder,
                           const Optimizer& optimizer, const RunState& state) {
  const at::NoGradGuard no_grad;
  auto snapshot = std::make_unique<Snapshot>(options, decoder, optimizer, state);
  step_ = state.step;
  writing_ = std::async(std::launch::async, [snapshot = std::move(snapshot)] {
    const at::NoGradGuard no_grad;
    return save_checkpoint(snapshot->options, snapshot->decoder, snapshot->optimizer, snapshot->state);
  });
}

bool BackgroundSave::is_done() const {
  return is_pending() && writing_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace espalier
