// SPDX-License-Identifier: Apache-2.0
// A batch of sequences that continue prefixes, one token per step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/model/decoder.h"
#include "espalier/sample/continuation.h"
#include "espalier/sample/prefix_tree.h"

namespace espalier {

/// Live sequences, each a prefix and a tail. Keys and values of a prefix are shared by all sequences that
/// continue it and are not copied. Each sequence has its own tail and its own states of recurrent layers.
/// Runs without autograd.
class DecodeBatch {
 public:
  /// `decoder` and `tree` must outlive this object.
  DecodeBatch(const Decoder& decoder, PrefixTree* tree) : decoder_(decoder), tree_(tree) {}

  int64_t num_live() const { return static_cast<int64_t>(live_.size()); }

  /// Adds a sequence that continues a prefix, whose hidden state is there. Returns its place: sequences are
  /// in preorder of their prefixes.
  int64_t add(const Prefix& prefix);

  /// Removes the sequences for which `keep` [num_live()] is false. The others keep their order.
  void keep(const std::vector<bool>& keep);

  /// Makes the tail of a sequence a part of the tree; `tokens`: those that it was given.
  void store(int64_t sequence, std::span<const int32_t> tokens);

  /// Appends one token to each live sequence: `tokens` [num_live()], not empty. Returns the last layer's
  /// hidden states [num_live(), hidden_size], which predict the next tokens.
  at::Tensor step(const std::vector<int32_t>& tokens);

 private:
  struct Live {
    Prefix prefix;
    int64_t slot;    // index into the tails
    int64_t length;  // tokens of the tail
    int64_t state;   // row of the states of the last step; -1: that of the prefix
  };

  void grow_tails();
  void update_states();

  const Decoder& decoder_;
  PrefixTree* tree_;
  std::vector<Live> live_;
  std::vector<int64_t> free_slots_;
  int64_t slots_ = 0, used_slots_ = 0;  // tails that there are, and those ever given out
  int64_t capacity_ = 0;                // tokens of a tail
  std::vector<LayerContext> tails_;     // by layer: k and v [slots, capacity, K, D]
  Encoded last_;                        // of the last step, which has the states
  bool changed_ = true;                 // whether live_ has changed since the last step
  Continuation pass_;
};

}  // namespace espalier
