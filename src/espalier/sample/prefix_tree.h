// SPDX-License-Identifier: Apache-2.0
// Tokens that a decoder has encoded, as a tree of prefixes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "espalier/config/config.h"
#include "espalier/model/model.h"

namespace espalier {

struct PrefixNode;

/// The tokens from a root to the end of a node. They stay while it is held.
using Prefix = std::shared_ptr<PrefixNode>;

/// N tokens that follow those of the parent, and what is kept of them.
struct PrefixNode {
  ~PrefixNode();

  Prefix parent{};                                          // null: a root, which has no tokens
  std::map<int32_t, std::weak_ptr<PrefixNode>> children{};  // by their first tokens, which differ
  std::vector<int32_t> tokens{};
  int64_t begin = 0;                   // position of the first token
  std::vector<LayerContext> keys{};    // by layer: keys and values [N, K, D]; of recurrent layers nothing
  std::vector<LayerContext> states{};  // by layer, recurrent ones: LayerContext [1, ...] at the end
  at::Tensor hidden{};  // [1, hidden_size] of the last layer at the end; undefined, as states: not kept
  std::vector<double> logprobs{};  // [N] of the tokens, 0 where nothing predicts it; empty: not kept
  int64_t bytes = 0;               // of all this
  int64_t used = 0;                // when, by the clock of the tree

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  int64_t end() const { return begin + size(); }
  bool is_root() const { return parent == nullptr; }
  bool is_encoded() const { return !keys.empty(); }
};

/// By layer, whether it is recurrent: its context is a state instead of keys and values.
std::vector<bool> recurrent_layers(const DecoderConfig& config);

/// What a pass has computed of tokens and their ends.
struct Encoded {
  std::vector<LayerContext> context;  // by layer: keys and values [T, K, D], or states [C, ...] of ends
  at::Tensor hidden;                  // [C, hidden_size] of the last layer
  at::Tensor all_hidden{};            // [T, hidden_size], where it is asked for
};

/// Prefixes of several sets of weights. What nothing holds is kept within a budget: what was not used for the
/// longest time goes first, ends of paths before what they continue.
class PrefixTree {
 public:
  /// `budget`: bytes, in which prefixes that are held count, too; 0: what nothing holds is not kept.
  PrefixTree(const DecoderConfig& config, int64_t budget)
      : recurrent_(recurrent_layers(config)), budget_(budget) {}

  /// The root of prefixes that these weights encode, by a number of theirs.
  Prefix root(int64_t weights);

  /// `tokens` after those of `from`, used now. Nodes that are new, of at most `most` tokens, are not encoded.
  Prefix add(const Prefix& from, std::span<const int32_t> tokens, int64_t most);

  /// Nodes that a pass has to encode, parents first, before `prefix` has `hidden`; with `scored` also before
  /// all its nodes have `logprobs`. It may divide nodes.
  std::vector<Prefix> unencoded(const Prefix& prefix, bool scored);

  /// Keeps copies: of tokens from `row` on, and of end `end`, or of none where it is -1. What the node has
  /// already stays as it is, and after an exception all does.
  void set(const Prefix& node, const Encoded& encoded, int64_t row, int64_t end);

  /// Splits a node: its first `size` tokens become a new node, its parent, which is returned.
  Prefix divide(const Prefix& node, int64_t size);

  /// Drops what is beyond the budget. Called where holders have gone.
  void trim() { trim(budget_); }
  /// Drops what nothing holds, whatever the budget: memory has run out.
  void drop_unused() { trim(0); }

  const std::vector<bool>& recurrent() const { return recurrent_; }
  bool keeps() const { return budget_ > 0; }
  int64_t bytes() const;

 private:
  void trim(int64_t budget);
  bool can_be_continued(const PrefixNode& node) const;

  std::vector<bool> recurrent_;
  int64_t budget_;
  std::map<int64_t, Prefix> roots_;  // by weights
  std::vector<Prefix> kept_;         // all that are encoded
  int64_t clock_ = 0;
};

}  // namespace espalier
