// SPDX-License-Identifier: Apache-2.0
// Sizes of a model's layers, from which time and memory are predicted.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/config/layer_spec.h"

namespace espalier {

/// Saved per token for the backward pass: elements of activations, and elements in the precision of gradient
/// sums (factors of norms, log-sum-exps).
struct KeptPerToken {
  int64_t elements = 0;
  int64_t statistics = 0;
};

/// Sizes of one layer, in elements. After its mixer the last layer of a decoder works on logit rows only.
struct LayerCost {
  int64_t weights = 0;              // of the linear maps that a token passes
  int64_t idle_weights = 0;         // of the linear maps that a token does not pass: experts not chosen
  int64_t weights_after_mixer = 0;  // the part of `weights` after the mixer
  int64_t biases = 0;               // of all linear maps, including experts not chosen, and sinks
  int64_t max_weight_rows = 0;      // rows [out] of the largest linear map from or to the hidden state

  // Of low-rank adapters (plan/adapter_cost.h), in the precision of sums; every token passes all of them.
  int64_t adapter_weights = 0;
  int64_t adapter_weights_after_mixer = 0;  // the part of them on maps after the mixer
  int64_t max_adapted_features = 0;         // in + out features of the largest map with an adapter

  /// Multiply-adds per token of a recurrence in the forward pass, without its linear maps.
  int64_t recurrence = 0;

  /// Elements that the scores of one visible (query, key) pair multiply, over all heads; the output
  /// multiplies as many. 0 in a layer without attention.
  int64_t pair_elements = 0;
  int64_t sliding_window = 0;  // limits the visible pairs; 0: none

  KeptPerToken kept_by_mixer = {};     // the layer's input and norm included
  KeptPerToken kept_after_mixer = {};  // the MLP's input and norm included
  int64_t mixer_output = 0;            // per token
  int64_t mixer_gradients = 0;         // temporary per token in the backward pass, in the precision of sums
  int64_t intermediate = 0;            // width of the MLP per token
  int64_t position_tables = 0;         // per token: cos and sin

  /// Context below a cut: per token above it (keys and values), and per run that is cut at its end (the state
  /// of a recurrence, in the precision of sums).
  int64_t context_per_token = 0;
  int64_t context_per_cut = 0;
};

LayerCost layer_cost(const LayerSpec& layer, int64_t hidden_size);

/// Sizes of a decoder.
struct ModelCost {
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  std::vector<LayerCost> layers;  // first to last, at least one
  int64_t rope_tables = 1;        // pairs of position tables that layers share
  bool frozen = false;            // only adapters are trained: weights have no gradients
  int64_t head_rank = 0;          // of the LM head's adapter; 0: none

  double num_layers() const { return static_cast<double>(layers.size()); }
  double attention_layers() const;  // with pair_elements
  /// The sum over all layers.
  int64_t sum(int64_t LayerCost::* member) const;
  /// Of all layers' linear maps that a token passes.
  double weights() const { return static_cast<double>(sum(&LayerCost::weights)); }
  /// Of all layers' linear maps.
  double stored_weights() const { return weights() + static_cast<double>(sum(&LayerCost::idle_weights)); }
  /// Of all layers and the LM head.
  double adapter_weights() const {
    return layer_adapters() + static_cast<double>(head_rank * (hidden_size + vocab_size));
  }
  double layer_adapters() const { return static_cast<double>(sum(&LayerCost::adapter_weights)); }
  double recurrence() const { return static_cast<double>(sum(&LayerCost::recurrence)); }
  int64_t position_tables() const;  // of all ropes, at the size of the largest: layers share them
  int64_t context_per_token() const { return sum(&LayerCost::context_per_token); }
  int64_t context_per_cut() const { return sum(&LayerCost::context_per_cut); }

  /// The sizes of the sliding windows of attention layers, ascending, each once.
  std::vector<int64_t> sliding_windows() const;
};

/// The sum over all attention layers of weight(layer) times its visible pairs: `pairs` without a window,
/// otherwise the entry of window_pairs (in the order of sliding_windows) for its window. If pairs is 0,
/// window_pairs may be empty.
double weighted_pairs(const ModelCost& model, int64_t pairs, std::span<const int64_t> window_pairs,
                      int64_t (*weight)(const LayerCost&));

ModelCost model_cost(const ModelSpec& spec);

}  // namespace espalier
