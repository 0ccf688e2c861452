// SPDX-License-Identifier: Apache-2.0
// FLOPs of a step, from counts.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/layer_cost.h"

namespace espalier {

/// The amount of work of one forward and backward pass.
struct Work {
  int64_t tokens = 0;                      // encoded tokens
  int64_t pairs = 0;                       // visible (query, key) pairs, per head and layer
  int64_t logit_rows = 0;                  // hidden states that reach the LM head
  std::vector<int64_t> window_pairs = {};  // pairs within each of ModelCost::sliding_windows

  Work& operator+=(const Work& other);
};

/// What determines the cost of one micro-batch.
struct Load {
  int64_t tokens = 0;
  int64_t pairs = 0;        // visible (query, key) pairs, keys in context included
  int64_t logit_rows = 0;   // tokens that reach the LM head
  int64_t terms = 0;        // loss terms that read its log-probabilities
  int64_t mask_blocks = 0;  // dense blocks of the mask: a triangle per run, a rectangle per run with
                            // descendants and per context block
  int64_t parent = -1;      // micro-batch whose context is inherited
  int64_t cuts = 0;         // runs that other micro-batches continue, reading the context
  std::vector<int64_t> window_pairs = {};  // pairs within each of ModelCost::sliding_windows

  bool has_readers() const { return cuts > 0; }
};

/// A multiply-add counts as two FLOPs. Linear layers: 2 per weight and token forward, 4 backward; after its
/// mixer the last layer works on logit rows only. Recurrences are counted with the linear layers: 2 per
/// multiply-add forward, 6 backward (chunks are recomputed). Attention: 4 head_dim per pair and head forward,
/// 10 head_dim backward (scores are recomputed; Dao, FlashAttention-2, 2023, section 4.1). LM head: 2 per
/// weight and row forward, 6 backward (logits are recomputed). Frozen weights have no gradient: 2 less per
/// weight backward. Adapters are additional linear layers.
struct FlopCount {
  double linear = 0;
  double attention = 0;
  double head = 0;
  double total() const { return linear + attention + head; }
};

FlopCount forward_flops(const ModelCost& model, const Work& work);
FlopCount backward_flops(const ModelCost& model, const Work& work);
FlopCount step_flops(const ModelCost& model, const Work& work);  // both

/// The work of all layers' linear maps and recurrences, in units of one token through a layer of average
/// size: layers x tokens, less the part of the last layer that works on logit rows only. With frozen weights
/// and adapters the unit is still a token through such a layer with all weights trained.
double layer_tokens(const ModelCost& model, const Work& work);

}  // namespace espalier
