// SPDX-License-Identifier: Apache-2.0
// FLOPs of a step, from counts.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/layer_cost.h"

namespace espalier {

/// Counts of what one forward and backward pass works on.
struct Work {
  int64_t tokens = 0;                      // encoded tokens
  int64_t pairs = 0;                       // visible (query, key) pairs, per head and layer
  int64_t logit_rows = 0;                  // hidden states that reach the LM head
  std::vector<int64_t> window_pairs = {};  // of the pairs, those in each of ModelCost::sliding_windows

  Work& operator+=(const Work& other);
};

/// Multiply-adds count as two FLOPs. Linear layers: 2 per weight and token forward, 4 backward; what comes
/// after the mixer of the last layer works on logit rows only. Recurrences, which count among them: 2 per
/// multiply-add forward, 6 backward (the chunks are computed again). Attention: 4 head_dim per pair and head
/// forward, 10 head_dim backward (the scores are computed again; Dao, FlashAttention-2, 2023, section 4.1).
/// LM head: 2 per weight and row forward, 6 backward (the logits are computed again). Frozen weights have no
/// gradient of their own: 2 less per weight backward. Adapters are linear layers beside them.
struct FlopCount {
  double linear = 0;
  double attention = 0;
  double head = 0;
  double total() const { return linear + attention + head; }
};

FlopCount forward_flops(const ModelCost& model, const Work& work);
FlopCount backward_flops(const ModelCost& model, const Work& work);
FlopCount step_flops(const ModelCost& model, const Work& work);  // both

/// The work of all layers' linear maps and recurrences, in tokens through a layer of average size. This is
/// layers x tokens, less what the last layer leaves out because it works on logit rows only after its mixer.
/// With frozen weights and adapters: in tokens through such a layer of the same model trained whole, of which
/// forward and backward do as much.
double layer_tokens(const ModelCost& model, const Work& work);

}  // namespace espalier
