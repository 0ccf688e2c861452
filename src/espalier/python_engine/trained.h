// SPDX-License-Identifier: Apache-2.0
// What an Engine trains, or samples from.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "espalier/config/lora.h"
#include "espalier/distributed/group.h"
#include "espalier/engine/cost.h"
#include "espalier/python_engine/engine.h"
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

/// What the rows of a pass train: one for all, or an adapter each.
struct TrainedRows {
  TrainedRows(const std::vector<EngineAdapter>& adapters, const std::shared_ptr<Trained>& in_use);

  /// Throws InputError unless there is an adapter for each row that can be trained.
  void check(const Trajectories& rows, const Group& group) const;
  /// After a pass. Returns the norm of all gradients.
  double count_gradients() const;

  std::vector<std::shared_ptr<Trained>> all;         // each once, in the order of rows
  std::vector<accumulating::AdapterMapsPtr> maps{};  // by row; empty: one for all
};

}  // namespace espalier::python_engine
