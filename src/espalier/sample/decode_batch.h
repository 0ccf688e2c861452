// SPDX-License-Identifier: Apache-2.0
// A batch of sequences that continue encoded prompts, one token per step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "espalier/model/decoder.h"
#include "espalier/sample/encoded_prompts.h"

namespace espalier {

/// Live sequences, each a prompt and a tail. Keys and values of a prompt are shared by all sequences that
/// continue it and are not copied. Each sequence has its own tail and its own states of recurrent layers.
/// Runs without autograd.
class DecodeBatch {
 public:
  /// `decoder` and `prompts` must outlive this object. `max_live`: maximum number of live sequences.
  DecodeBatch(const Decoder& decoder, const EncodedPrompts& prompts, int64_t max_live);
  ~DecodeBatch();

  int64_t num_live() const { return static_cast<int64_t>(live_.size()); }

  /// Appends a sequence that continues a prompt. Sequences of one prompt, and of prompts that share a prefix,
  /// must be consecutive: add prompts in preorder of their paths.
  void add(int64_t prompt);

  /// Removes the sequences for which `keep` [num_live()] is false. The others keep their order.
  void keep(const std::vector<bool>& keep);

  /// Appends one token to each live sequence: `tokens` [num_live()], not empty. Returns the last layer's
  /// hidden states [num_live(), hidden_size], which predict the next tokens.
  at::Tensor step(const std::vector<int32_t>& tokens);

 private:
  struct Live {
    int64_t prompt;
    int64_t slot;    // index into the tails
    int64_t length;  // tokens of the tail
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
  std::vector<LayerContext> states_;  // by layer: of the sequences that have been stepped
  /// Index of each live sequence's state in states_, or -1 - p for the state at the end of prompt p.
  std::vector<int64_t> state_of_;
  bool changed_ = true;                   // whether live_ has changed since the last step
  std::vector<int64_t> prompt_blocks_;    // rows of AttentionContext::blocks
  std::vector<int64_t> block_positions_;  // likewise, AttentionContext::positions
  std::unique_ptr<Sequence> sequence_;
};

}  // namespace espalier
