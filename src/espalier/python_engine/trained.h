// SPDX-License-Identifier: Apache-2.0
// What an Engine trains or samples from: all weights, or one of several adapters over shared weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>

#include "espalier/config/lora.h"
#include "espalier/model/decoder.h"
#include "espalier/plan/cost_model.h"
#include "espalier/train/optimizer/step_trainer.h"

namespace espalier::python_engine {

/// Values, gradients and optimiser state. Those that share weights are used in turns.
struct Trained {
  /// `lora`: options of the decoder's adapter, or without maps where it has none and is frozen; nullopt: all
  /// weights are trained. `group` outlives it.
  Trained(Decoder decoder, std::optional<LoraOptions> lora, const OptimizerOptions& optimizer,
          const Group& group);

  const Decoder& decoder() const { return trainer.decoder(); }
  void clear();  // the gradients

  /// Throw InputError unless weights are whole, something is trained, or the adapter of a folder has the
  /// maps, rank and scale of this one.
  void check_whole() const;
  void check_trains() const;
  void check_adapter_of(const std::filesystem::path& folder) const;

  StepTrainer trainer;
  std::optional<LoraOptions> lora;
  ModelCost cost;
  int64_t step = 0;       // optimiser steps done
  double grad_norm = 0;   // of the accumulated gradients
  int64_t num_added = 0;  // calls of forward_backward since the last step
  bool is_half_loaded = false;
};

}  // namespace espalier::python_engine
