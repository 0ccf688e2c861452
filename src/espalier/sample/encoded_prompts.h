// SPDX-License-Identifier: Apache-2.0
// Prompts, passed through a decoder once as trees: what sequences that go on from them read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"

namespace espalier {

/// A stretch of keys on a prompt's path: keys [begin, end) of segment `segment`, the first of them at
/// `position` of the path.
struct KeyRange {
  int64_t segment, begin, end, position;

  bool operator==(const KeyRange&) const = default;
};

/// The prompts of some rows. Every token that they share is encoded once, in micro-batches of a partition,
/// each of which leaves a segment of keys and values. Records no graph.
class EncodedPrompts {
 public:
  /// `rows` of `prompts`, in any order; P of them. Micro-batches have at most `token_budget` tokens.
  /// `progress` is told of micro-batches.
  EncodedPrompts(const Decoder& decoder, const Trajectories& prompts, std::vector<int64_t> rows,
                 int64_t token_budget, const MicroBatchProgress& progress = {});

  int64_t num_prompts() const { return paths_.num_rows(); }
  int64_t num_segments() const { return static_cast<int64_t>(contexts_.size()); }
  int64_t size(int64_t prompt) const { return sizes_[prompt]; }
  int64_t tree_tokens() const { return tree_tokens_; }

  /// Row p: the keys on the path of prompt p, from its root on.
  const Csr<KeyRange>& paths() const { return paths_; }

  /// Keys and values of a segment in an attention layer.
  const LayerContext& segment(int64_t segment, int64_t layer) const { return contexts_[segment][layer]; }

  /// What a recurrent layer has at the ends of the prompts: state and convolution tail [P, ...]. Empty for
  /// attention.
  const LayerContext& states(int64_t layer) const { return states_[layer]; }

  /// [P, hidden_size] of the last layer at the last token of each prompt.
  const at::Tensor& last_hidden() const { return last_hidden_; }

 private:
  std::vector<int64_t> sizes_;
  int64_t tree_tokens_ = 0;
  Csr<KeyRange> paths_;
  std::vector<std::vector<LayerContext>> contexts_;  // by segment and layer; empty for recurrent layers
  std::vector<LayerContext> states_;                 // by layer
  at::Tensor last_hidden_;
};

/// Which layers are recurrent: their context is a state, not keys and values.
std::vector<bool> recurrent_layers(const DecoderConfig& config);

}  // namespace espalier
