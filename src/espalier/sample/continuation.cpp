// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/continuation.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "espalier/ops/paths.h"
#include "espalier/runtime/device.h"

namespace espalier {

// Those that see a node are consecutive, as the rows are in preorder.
void Continuation::see(std::span<const Rows> rows,
                       const std::unordered_map<const PrefixNode*, int64_t>& own) {
  struct Seen {
    const PrefixNode* node;
    int64_t begin, end;
  };
  std::vector<Seen> seen;
  std::vector<size_t> open;  // what the row before sees, from its root
  for (const Rows& row : rows) {
    std::vector<const PrefixNode*> path;
    for (const PrefixNode* node = row.prefix; !node->is_root(); node = node->parent.get())
      path.push_back(node);
    std::ranges::reverse(path);
    size_t shared = 0;
    while (shared < std::min(open.size(), path.size()) && seen[open[shared]].node == path[shared]) {
      seen[open[shared]].end = std::max(seen[open[shared]].end, row.end);
      ++shared;
    }
    open.resize(shared);
    for (; shared < path.size(); ++shared) {
      open.push_back(seen.size());
      seen.push_back({path[shared], row.begin, row.end});
    }
  }
  segments_.clear();
  blocks_.clear();
  block_positions_.clear();
  for (const Seen& each : seen) {
    if (own.contains(each.node)) continue;
    blocks_.insert(blocks_.end(),
                   {static_cast<int64_t>(segments_.size()), 0, each.node->size(), each.begin, each.end});
    block_positions_.push_back(each.node->begin);
    segments_.push_back(each.node);
  }
}

void Continuation::see_tail(int64_t row, int64_t begin, int64_t end, int64_t position) {
  blocks_.insert(blocks_.end(), {static_cast<int64_t>(segments_.size()), begin, end, row, row + 1});
  block_positions_.push_back(position);
}

at::Tensor Continuation::attention(int64_t layer, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const AttentionOptions& options) const {
  AttentionContext context = context_;
  const auto add = [&](const LayerContext& keys) {
    context.k.push_back(keys[0]);
    context.v.push_back(keys[1]);
  };
  for (const PrefixNode* segment : segments_) add(segment->keys[layer]);
  if (!tails.empty()) add(tails[layer]);
  return tree_attention(q, k, v, tokens_, options, context);
}

Encoded Continuation::run(const Decoder& decoder) {
  std::vector<int64_t> ends;
  for (const int64_t node : structure.cuts) ends.push_back(structure.begin[node + 1] - 1);
  const at::Tensor position = at::tensor(positions, at::kLong);
  const std::vector<at::Tensor> on_device =
      upload({at::tensor(ids, at::kLong), position, position.to(at::kInt), at::tensor(subtree_end, at::kInt),
              at::tensor(ends, at::kLong)},
             decoder.device());
  tokens_ = {.subtree_end = on_device[3], .position = on_device[2]};
  context_.blocks = at::tensor(blocks_, at::kLong).view({-1, 5});
  context_.positions = at::tensor(block_positions_, at::kLong);
  const PositionTables tables = decoder.position_tables(on_device[1]);
  const accumulating::RowAdapterScope scope(accumulating::RowAdapters(adapters, {structure.begin}));
  Encoded encoded{.context = {}, .hidden = decoder.embed(on_device[0])};
  for (int64_t layer = 0; layer < decoder.num_layers(); ++layer) {
    const bool is_last = layer + 1 == decoder.num_layers();
    const bool is_short = is_last && !keeps_hidden && ends.size() < ids.size();
    const at::Tensor rows = is_short ? on_device[4] : at::Tensor();
    LayerOutput output = decoder.layer(layer, encoded.hidden, tables, *this, rows);
    encoded.hidden = std::move(output.hidden);
    encoded.context.push_back(std::move(output.context));
  }
  if (keeps_hidden) {
    encoded.all_hidden = encoded.hidden;
    encoded.hidden = encoded.hidden.index_select(0, on_device[4]);
  }
  return encoded;
}

std::vector<LayerContext> states_of(std::span<const PrefixNode* const> prefixes,
                                    const std::vector<bool>& recurrent) {
  std::vector<LayerContext> states(recurrent.size());
  for (size_t layer = 0; layer < recurrent.size() && !prefixes.empty(); ++layer) {
    if (!recurrent[layer]) continue;
    for (size_t i = 0; i < prefixes.front()->states[layer].size(); ++i) {
      std::vector<at::Tensor> parts;
      for (const PrefixNode* prefix : prefixes) parts.push_back(prefix->states[layer][i]);
      states[layer].push_back(at::cat(parts));
    }
  }
  return states;
}

namespace {

constexpr int64_t kScoredRows = 256;  // whose logits there are at a time

/// Log-probabilities of tokens, each predicted by a row of hidden states.
std::vector<double> logprobs_of(const Decoder& decoder, const at::Tensor& hidden,
                                const accumulating::AdapterMapsPtr& adapter,
                                std::span<const int32_t> tokens) {
  std::vector<double> logprobs;
  for (int64_t begin = 0; begin < hidden.size(0); begin += kScoredRows) {
    const int64_t count = std::min(kScoredRows, hidden.size(0) - begin);
    const accumulating::RowAdapterScope scope(accumulating::RowAdapters({adapter}, {{0, count}}));
    const at::Tensor rows = decoder.final_norm(hidden.narrow(0, begin, count));
    const at::Tensor logits = decoder.capped(accumulating::head_logits(rows, decoder.lm_head()));
    const at::Tensor target = at::tensor(tokens.subspan(begin, count), at::kLong).to(decoder.device());
    const at::Tensor found = logits.log_softmax(1).gather(1, target.unsqueeze(1)).to(at::kCPU, at::kDouble);
    logprobs.insert(logprobs.end(), found.const_data_ptr<double>(), found.const_data_ptr<double>() + count);
  }
  return logprobs;
}

}  // namespace

void encode(const Decoder& decoder, std::span<const Prefix> nodes,
            const std::vector<accumulating::AdapterMapsPtr>& adapters, bool scored, PrefixTree* tree) {
  Continuation pass;
  pass.adapters = adapters;
  pass.keeps_hidden = scored;
  std::unordered_map<const PrefixNode*, int64_t> place;
  std::vector<int64_t> begin{0}, parent,
      above;  // above: the last ancestor in this pass, encoded ones between
  for (const Prefix& node : nodes) {
    const PrefixNode* ancestor = node->parent.get();
    while (ancestor != nullptr && !place.contains(ancestor)) ancestor = ancestor->parent.get();
    above.push_back(ancestor == nullptr ? -1 : place[ancestor]);
    parent.push_back(ancestor == node->parent.get() ? above.back() : -1);
    place.emplace(node.get(), static_cast<int64_t>(place.size()));
    pass.ids.insert(pass.ids.end(), node->tokens.begin(), node->tokens.end());
    begin.push_back(static_cast<int64_t>(pass.ids.size()));
    for (int64_t position = node->begin; position < node->end(); ++position)
      pass.positions.push_back(position);
  }
  std::vector<int64_t> end(begin.begin() + 1, begin.end());  // of subtrees
  for (size_t n = nodes.size(); n-- > 0;) {
    if (above[n] >= 0) end[above[n]] = std::max(end[above[n]], end[n]);
  }
  pass.structure = make_node_structure(begin, parent);
  pass.structure.cuts.resize(nodes.size());
  std::iota(pass.structure.cuts.begin(), pass.structure.cuts.end(), 0);
  std::vector<Continuation::Rows> roots;
  std::vector<const PrefixNode*> continued;
  for (size_t n = 0; n < nodes.size(); ++n) {
    pass.subtree_end.resize(begin[n + 1], static_cast<int32_t>(end[n]));
    if (parent[n] >= 0) continue;
    const PrefixNode* before = nodes[n]->parent.get();
    roots.push_back({before, begin[n], end[n]});
    if (before->is_root()) continue;
    pass.structure.prev[begin[n]] = detail::continues(static_cast<int64_t>(continued.size()));
    continued.push_back(before);
  }
  pass.see(roots, place);
  pass.states = states_of(continued, tree->recurrent());
  const Encoded encoded = pass.run(decoder);
  for (size_t n = 0; n < nodes.size(); ++n) tree->set(nodes[n], encoded, begin[n], static_cast<int64_t>(n));
  for (size_t n = 0; scored && n < nodes.size(); ++n) {
    PrefixNode& node = *nodes[n];
    const PrefixNode& before = *node.parent;  // whose end predicts the first token
    if (!before.is_root() && !before.hidden.defined()) continue;
    const at::Tensor own = encoded.all_hidden.narrow(0, begin[n], node.size() - 1);
    std::vector<double> logprobs(before.is_root() ? 1 : 0, 0);
    const std::vector<double> others =
        logprobs_of(decoder, before.is_root() ? own : at::cat({before.hidden, own}), adapters[n],
                    std::span(node.tokens).subspan(logprobs.size()));
    logprobs.insert(logprobs.end(), others.begin(), others.end());
    node.logprobs = std::move(logprobs);  // all of them, or none after an exception
  }
}

}  // namespace espalier
