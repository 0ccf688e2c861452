// SPDX-License-Identifier: Apache-2.0
// Sequences that go on from encoded prompts, one token at a time, together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "espalier/model/decoder.h"
#include "espalier/sample/encoded_prompts.h"

namespace espalier {

/// Live sequences, each a path that begins with a prompt. Keys and values of prompts stay where they are and
/// are read by all sequences that go on from them; every sequence has a tail of its own. States of recurrent
/// layers are kept for every sequence. Records no graph.
class DecodeBatch {
 public:
  /// Both must outlive this object. At most `max_live` sequences live at a time.
  DecodeBatch(const Decoder& decoder, const EncodedPrompts& prompts, int64_t max_live);
  ~DecodeBatch();

  int64_t num_live() const { return static_cast<int64_t>(live_.size()); }

  /// Lets a sequence begin after a prompt. It becomes the last one. Sequences of one prompt, and of prompts
  /// that share a prefix, must follow one another: prompts come in the order of paths in preorder.
  void add(int64_t prompt);

  /// Ends the sequences for which `keep` [num_live()] is false. The others keep their order.
  void keep(const std::vector<bool>& keep);

  /// Appends a token to each live sequence, `tokens` [num_live()], at least one. Returns the last layer's
  /// hidden states [num_live(), hidden_size], which predict the next ones.
  at::Tensor step(const std::vector<int32_t>& tokens);

 private:
  struct Live {
    int64_t prompt;
    int64_t slot;    // of the tails
    int64_t length;  // of the tail
  };
  class Sequence;

  void grow_tails();
  void update_prompt_blocks();
  void update_states();
  void set_tail_blocks();

  const Decoder& decoder_;
  const EncodedPrompts& prompts_;
  std::vector<bool> recurrent_;  // by layer
  int64_t max_live_;
  int64_t capacity_ = 0;  // tokens of a tail
  std::vector<Live> live_;
  std::vector<int64_t> free_slots_;
  std::vector<LayerContext> tails_;   // by layer: k and v [max_live, capacity, K, D]
  std::vector<LayerContext> states_;  // by layer: of the sequences in stepped_
  /// Where each live sequence's state is: in states_, or -1 - p at the end of prompt p.
  std::vector<int64_t> state_of_;
  bool changed_ = true;                   // since the last step
  std::vector<int64_t> prompt_blocks_;    // rows of AttentionContext::blocks
  std::vector<int64_t> block_positions_;  // AttentionContext::positions of these
  std::unique_ptr<Sequence> sequence_;
};

}  // namespace espalier
