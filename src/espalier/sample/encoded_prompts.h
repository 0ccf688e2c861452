// SPDX-License-Identifier: Apache-2.0
// Prompts encoded once as trees, for sequences that continue them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"

namespace espalier {

/// A range of keys on a prompt's path: keys [begin, end) of a segment. `position`: of the first key on the
/// path.
struct KeyRange {
  int64_t segment, begin, end, position;

  bool operator==(const KeyRange&) const = default;
};

/// Encoded prompts. Shared tokens are encoded once. Each micro-batch of the partition yields a segment of
/// keys and values. Runs without autograd.
class EncodedPrompts {
 public:
  /// `rows`: P rows of `prompts`, in any order. Micro-batches have at most `token_budget` tokens.
  /// `progress` is called after each micro-batch.
  EncodedPrompts(const Decoder& decoder, const Trajectories& prompts, std::vector<int64_t> rows,
                 int64_t token_budget, const MicroBatchProgress& progress = {});

  int64_t num_prompts() const { return paths_.num_rows(); }
  int64_t num_segments() const { return static_cast<int64_t>(contexts_.size()); }
  int64_t size(int64_t prompt) const { return sizes_[prompt]; }
  int64_t tree_tokens() const { return tree_tokens_; }

  /// Row p: the keys on the path of prompt p, from its root.
  const Csr<KeyRange>& paths() const { return paths_; }

  /// Keys and values of a segment in an attention layer.
  const LayerContext& segment(int64_t segment, int64_t layer) const { return contexts_[segment][layer]; }

  /// State and convolution tail [P, ...] of a recurrent layer at the ends of the prompts. Empty for
  /// attention.
  const LayerContext& states(int64_t layer) const { return states_[layer]; }

  /// [P, hidden_size]: hidden states of the last layer at the last token of each prompt.
  const at::Tensor& last_hidden() const { return last_hidden_; }

 private:
  std::vector<int64_t> sizes_;
  int64_t tree_tokens_ = 0;
  Csr<KeyRange> paths_;
  std::vector<std::vector<LayerContext>> contexts_;  // by segment and layer; empty for recurrent layers
  std::vector<LayerContext> states_;                 // by layer
  at::Tensor last_hidden_;
};

/// By layer, whether it is recurrent: its context is a state instead of keys and values.
std::vector<bool> recurrent_layers(const DecoderConfig& config);

}  // namespace espalier
