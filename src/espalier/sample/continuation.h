// SPDX-License-Identifier: Apache-2.0
// A pass over tokens that continue prefixes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "espalier/model/decoder.h"
#include "espalier/sample/prefix_tree.h"

namespace espalier {

/// T tokens as a forest in preorder, whose roots continue prefixes. Keys and values of prefixes are read in
/// place. For passes without autograd.
class Continuation : public SequenceOps {
 public:
  /// The tokens, on the host: ids and positions [T], and the nodes, all of which are cuts.
  std::vector<int64_t> ids{}, positions{};
  NodeStructure structure{};
  std::vector<int32_t> subtree_end{};  // [T], see ForestTokens
  /// By layer, recurrent ones: LayerContext [C, ...] that roots continue (NodeStructure::prev).
  std::vector<LayerContext> states{};
  /// The adapters of the nodes, which are none of the decoder's; empty: none.
  std::vector<accumulating::AdapterMapsPtr> adapters{};
  /// By layer: keys and values [N, K, D] of one more segment, of which tokens see what see_tail says.
  std::vector<LayerContext> tails{};
  bool keeps_hidden = false;  // of all tokens

  /// Tokens [begin, end) continue a prefix, which outlives this object.
  struct Rows {
    const PrefixNode* prefix;
    int64_t begin, end;
  };
  /// Which keys the tokens see, in place of all before; `rows` in preorder of the prefixes. Without those of
  /// `own`, nodes whose tokens are among these.
  void see(std::span<const Rows> rows, const std::unordered_map<const PrefixNode*, int64_t>& own = {});
  /// Token `row` also sees keys [begin, end) of the tails, on its path from `position` on.
  void see_tail(int64_t row, int64_t begin, int64_t end, int64_t position);

  /// The context of all layers, and hidden states [C, hidden_size] at the ends of the nodes.
  Encoded run(const Decoder& decoder);

  at::Tensor attention(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOptions& options) const override;
  const NodeStructure& nodes() const override { return structure; }
  std::vector<at::Tensor> cut_context(int64_t layer) const override {
    return states.empty() ? LayerContext() : states[layer];
  }

 private:
  std::vector<const PrefixNode*> segments_;
  std::vector<int64_t> blocks_, block_positions_;  // of AttentionContext
  AttentionContext context_;                       // without keys and values
  ForestTokens tokens_;
};

/// States at the ends of prefixes, by layer: LayerContext [N, ...]; empty for attention, and without
/// prefixes.
std::vector<LayerContext> states_of(std::span<const PrefixNode* const> prefixes,
                                    const std::vector<bool>& recurrent);

/// Encodes nodes in one pass, with an adapter each or none, and keeps what it computes of them. They are in
/// preorder; what each continues is encoded, or is among those before it. `scored`: also log-probabilities of
/// their tokens, but where the hidden state before a node is not kept.
void encode(const Decoder& decoder, std::span<const Prefix> nodes,
            const std::vector<accumulating::AdapterMapsPtr>& adapters, bool scored, PrefixTree* tree);

}  // namespace espalier
