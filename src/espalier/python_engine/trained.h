// SPDX-License-Identifier: Apache-2.0
// What an Engine trains, or samples from.
#pragma once

#include <filesystem>
#include <optional>
#include <utility>

#include "espalier/config/lora.h"
#include "espalier/distributed/group.h"
#include "espalier/engine/cost.h"
#include "espalier/train/optimizer/step_trainer.h"

namespace espalier::python_engine {

/// All weights or one of several adapters over them: values, gradients and optimiser state.
struct Trained {
  /// `lora`: options of the decoder's adapter, or without maps where it has none and is frozen; nullopt: all
  /// weights are trained. `group` outlives it.
  Trained(Decoder decoder, std::optional<LoraOptions> lora, const OptimizerOptions& optimizer,
          const Group& group)
      : trainer(std::move(decoder), optimizer, group),
        lora(std::move(lora)),
        maps(this->decoder().adapter_maps()),
        cost(cost_of(this->decoder())) {}

  const Decoder& decoder() const { return trainer.decoder(); }

  void clear() {
    trainer.zero_gradients();
    num_added = 0;
    grad_norm = 0;
  }

  /// Throws InputError after a load or a step that failed half-way.
  void check_whole() const;
  /// Throws InputError where nothing can be trained.
  void check_trains() const;
  /// Throws InputError unless the adapter of the folder has the maps, rank and scale of this one.
  void check_adapter_of(const std::filesystem::path& folder) const;

  StepTrainer trainer;
  std::optional<LoraOptions> lora;
  accumulating::AdapterMapsPtr maps;  // one, so that rows of one adapter are seen to be that
  ModelCost cost;
  int64_t weights = 0;    // a number that no other weights of the engine have, and these until they change
  int64_t step = 0;       // optimiser steps done
  double grad_norm = 0;   // of the accumulated gradients
  int64_t num_added = 0;  // calls of forward_backward since the last step
  bool is_half_loaded = false;
};

}  // namespace espalier::python_engine
