// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are written while the next steps go on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <future>

#include "espalier/train/run/checkpoint.h"

namespace espalier {

/// Bytes of moments and master weights per element of a trained parameter of this dtype on a rank of
/// options.group, and on a CPU those of the copy of all of them and of the weights that
/// options.save_in_background makes on the first rank.
double state_bytes(const TrainOptions& options, at::ScalarType dtype, at::Device device);

/// A decoder with copies of what is trained: of weights and buffers in host memory, or of an adapter on its
/// device, whose frozen weights are shared.
Decoder copy_of(const Decoder& decoder);

/// Writes one checkpoint at a time in a thread, from a copy of weights and optimiser state. The destructor
/// waits for the thread.
class BackgroundSave {
 public:
  /// Copies weights to host memory (an adapter: to memory of its device), and starts save_checkpoint with
  /// them and with copies of the optimiser state, which replace its tensors. Call finish() between two calls.
  void start(const CheckpointOptions& options, const Decoder& decoder, OptimizerState* optimizer,
             const RunState& state);

  /// Whether a checkpoint was started whose result has not been taken.
  bool is_pending() const { return writing_.valid(); }
  bool is_done() const;
  /// The step of the last one that was started.
  int64_t step() const { return step_; }
  /// Waits for the result of save_checkpoint: returns its folder or throws its exception.
  std::filesystem::path finish() { return writing_.get(); }

 private:
  int64_t step_ = 0;
  std::future<std::filesystem::path> writing_;
};

}  // namespace espalier
