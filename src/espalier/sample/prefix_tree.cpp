// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/prefix_tree.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/config/layer_spec.h"

namespace espalier {
namespace {

int64_t bytes_of(const PrefixNode& node) {
  auto bytes = static_cast<int64_t>(node.logprobs.size() * sizeof(double));
  if (node.hidden.defined()) bytes += static_cast<int64_t>(node.hidden.nbytes());
  for (const auto& layers : {std::cref(node.keys), std::cref(node.states)}) {
    for (const LayerContext& layer : layers.get()) {
      for (const at::Tensor& tensor : layer) bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

at::Tensor copied(const at::Tensor& tensor, int64_t begin, int64_t size) {
  return tensor.narrow(0, begin, size).clone(at::MemoryFormat::Contiguous);
}

std::vector<LayerContext> copied(const std::vector<LayerContext>& layers, int64_t begin, int64_t size) {
  std::vector<LayerContext> copies(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    for (const at::Tensor& tensor : layers[i]) copies[i].push_back(copied(tensor, begin, size));
  }
  return copies;
}

}  // namespace

std::vector<bool> recurrent_layers(const DecoderConfig& config) {
  std::vector<bool> recurrent;
  for (const LayerSpec& layer : config.layers) {
    recurrent.push_back(!std::holds_alternative<AttentionSpec>(layer.mixer) &&
                        !std::holds_alternative<LatentAttentionSpec>(layer.mixer));
  }
  return recurrent;
}

// A path of which nothing else is held goes node by node: a long one would be too deep for recursion.
PrefixNode::~PrefixNode() {
  Prefix above = std::move(parent);
  if (above) above->children.erase(tokens.front());
  while (above && above.use_count() == 1 && above->parent) {
    Prefix next = std::move(above->parent);
    next->children.erase(above->tokens.front());
    above = std::move(next);
  }
}

Prefix PrefixTree::root(int64_t weights) {
  Prefix& root = roots_[weights];
  if (!root) root = std::make_shared<PrefixNode>();
  return root;
}

Prefix PrefixTree::add(const Prefix& from, std::span<const int32_t> tokens, int64_t most) {
  Prefix node = from;
  while (!tokens.empty()) {
    std::weak_ptr<PrefixNode>& place = node->children[tokens.front()];
    Prefix child = place.lock();
    if (child) {
      const auto same = std::ranges::mismatch(child->tokens, tokens).in1 - child->tokens.begin();
      if (same < child->size()) child = divide(child, same);
    } else {
      child = std::make_shared<PrefixNode>();
      const auto own = tokens.first(std::min(tokens.size(), static_cast<size_t>(most)));
      child->tokens.assign(own.begin(), own.end());
      child->begin = node->end();
      child->parent = node;
      place = child;
    }
    tokens = tokens.subspan(child->tokens.size());
    node = std::move(child);
  }
  ++clock_;
  for (PrefixNode* used = node.get(); used != nullptr; used = used->parent.get()) used->used = clock_;
  return node;
}

Prefix PrefixTree::divide(const Prefix& node, int64_t size) {
  const auto first = std::make_shared<PrefixNode>();
  const auto middle = node->tokens.begin() + size;
  first->tokens.assign(node->tokens.begin(), middle);
  node->tokens.erase(node->tokens.begin(), middle);
  first->parent = std::exchange(node->parent, first);
  first->parent->children[first->tokens.front()] = first;
  first->children[node->tokens.front()] = node;
  first->begin = std::exchange(node->begin, node->begin + size);
  first->used = node->used;
  if (!node->logprobs.empty()) {
    first->logprobs.assign(node->logprobs.begin(), node->logprobs.begin() + size);
    node->logprobs.erase(node->logprobs.begin(), node->logprobs.begin() + size);
  }
  if (node->is_encoded()) {
    first->keys = copied(node->keys, 0, size);
    node->keys = copied(node->keys, size, node->size());
    for (const Prefix& part : {first, node}) part->bytes = bytes_of(*part);
    kept_.push_back(first);
  }
  return first;
}

bool PrefixTree::can_be_continued(const PrefixNode& node) const {
  const bool needs_state = std::ranges::count(recurrent_, true) > 0;
  return node.is_root() || (node.is_encoded() && (!needs_state || node.hidden.defined()));
}

std::vector<Prefix> PrefixTree::unencoded(const Prefix& prefix, bool scored) {
  Prefix first;  // that lacks log-probabilities
  for (Prefix node = prefix; scored && !node->is_root(); node = node->parent) {
    if (node->logprobs.empty()) first = node;
  }
  if (!first && prefix->hidden.defined()) return {};
  // The last token alone, where only the hidden state lacks at an end that is wanted, or predicts `first`.
  const Prefix end = first ? first->parent : prefix;
  if (!end->hidden.defined() && can_be_continued(*end) && end->size() > 1) divide(end, end->size() - 1);
  const auto can_begin = [&](const Prefix& node) {
    const PrefixNode& before = *node->parent;
    if (node == first) return before.is_root() || before.hidden.defined();
    return (!first || node->begin < first->begin) && can_be_continued(before);
  };
  std::vector<Prefix> nodes{prefix};
  while (!can_begin(nodes.back())) nodes.push_back(nodes.back()->parent);
  std::ranges::reverse(nodes);
  return nodes;
}

void PrefixTree::set(const Prefix& node, const Encoded& encoded, int64_t row, int64_t end) {
  ESPALIER_ASSERT(encoded.context.size() == recurrent_.size());
  const bool is_new = !node->is_encoded(), has_end = end >= 0 && !node->hidden.defined();
  std::vector<LayerContext> keys(recurrent_.size()), states(recurrent_.size());
  for (size_t layer = 0; layer < recurrent_.size(); ++layer) {
    for (const at::Tensor& tensor : encoded.context[layer]) {
      if (recurrent_[layer] && has_end) states[layer].push_back(copied(tensor, end, 1));
      if (!recurrent_[layer] && is_new) keys[layer].push_back(copied(tensor, row, node->size()));
    }
  }
  if (has_end) {
    node->hidden = copied(encoded.hidden, end, 1);
    node->states = std::move(states);
  }
  if (is_new) {
    kept_.push_back(node);
    node->keys = std::move(keys);
  }
  node->bytes = bytes_of(*node);
}

int64_t PrefixTree::bytes() const {
  int64_t bytes = 0;
  for (const Prefix& node : kept_) bytes += node->bytes;
  return bytes;
}

// A node was used when one below it was, or later. So in this order all below it come before it.
void PrefixTree::trim(int64_t budget) {
  std::erase_if(
      roots_, [](const auto& root) { return root.second.use_count() == 1 && root.second->children.empty(); });
  int64_t left = bytes();
  if (left <= budget) return;
  std::ranges::sort(kept_, {}, [](const Prefix& node) { return std::pair(node->used, -node->begin); });
  for (Prefix& node : kept_) {
    if (left <= budget) break;
    if (node.use_count() > 1) continue;  // it is held, or continued by one that is kept
    left -= node->bytes;
    node.reset();
  }
  std::erase(kept_, nullptr);
}

}  // namespace espalier
