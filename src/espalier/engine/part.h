// SPDX-License-Identifier: Apache-2.0
// The part that a rank has of a micro-batch which several ranks compute together (context parallelism). In
// every layer attention receives the keys and values that its queries see on other ranks, and sends back
// their gradients. All ranks of the group run the same layers, so that they exchange in the same order, also
// a rank without tokens, which has a stand-in: the first token, which nobody sees and which has no terms.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "espalier/engine/step.h"
#include "espalier/ops/attention/tree_attention.h"

namespace espalier {

class BatchPart {
 public:
  /// Of micro-batch `index`, with this layout, of a step with a context_group. The step must outlive it.
  BatchPart(const Step& step, int64_t index, Layout layout);

  /// Numbers in the micro-batch, ascending.
  const std::vector<int64_t>& tokens() const { return tokens_; }
  bool is_stand_in() const { return is_stand_in_; }

  /// Where a token of the micro-batch is among those of the part; -1: on another rank.
  int64_t place(int64_t token) const;

  /// Among the tokens of the part: one past the subtree of each, as in ForestTokens.
  std::vector<int32_t> subtree_ends() const;

  /// tree_attention, where `context` has the keys and values of the ancestors' frames, and other ranks the
  /// rest. Gradients of what other ranks have read come back to k, v and the context.
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const ForestTokens& tokens, const AttentionOptions& options,
                       AttentionContext context) const;

  struct Reads;  // KeyReads on the device

 private:
  const c10::intrusive_ptr<Reads>& reads(int64_t sliding_window, at::Device device) const;

  const Step& step_;
  int64_t index_;
  Layout layout_;
  std::vector<int64_t> tokens_;
  bool is_stand_in_;
  mutable std::map<int64_t, c10::intrusive_ptr<Reads>> reads_;  // by window
};

}  // namespace espalier
