// SPDX-License-Identifier: Apache-2.0
// FLOPs of a step, from counts.
#pragma once

#include <cstdint>

namespace espalier {

/// Counts of what one forward and backward pass works on.
struct Work {
  int64_t tokens = 0;      // encoded tokens
  int64_t pairs = 0;       // visible (query, key) pairs, per head and layer
  int64_t logit_rows = 0;  // hidden states that reach the LM head

  Work& operator+=(const Work& other);
};

/// The sizes of a decoder that decide its cost. Names as in a Hugging Face config.json.
struct ModelShape {
  int64_t num_hidden_layers = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
};

/// Multiply-adds count as two FLOPs. Linear layers: 2 per weight and token forward, 4 backward; the output
/// projection and the MLP of the last layer work on logit rows only. Attention: 4 head_dim per pair and head
/// forward, 10 head_dim backward (the scores are computed again; Dao, FlashAttention-2, 2023, section 4.1).
/// LM head: 2 per weight and row forward, 6 backward (the logits are computed again).
struct FlopCount {
  double linear = 0;
  double attention = 0;
  double head = 0;
  double total() const { return linear + attention + head; }
};

FlopCount forward_flops(const ModelShape& shape, const Work& work);
FlopCount backward_flops(const ModelShape& shape, const Work& work);
FlopCount step_flops(const ModelShape& shape, const Work& work);  // both

/// Weights of one decoder layer's linear maps, and of those after its attention only, in elements.
int64_t linear_parameters_per_layer(const ModelShape& shape);
int64_t linear_parameters_after_attention(const ModelShape& shape);

/// The work of all layers' linear maps, in tokens through one layer. This is layers x tokens, less what the
/// last layer leaves out because it works on logit rows only after its attention.
double layer_tokens(const ModelShape& shape, const Work& work);

}  // namespace espalier
