// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/decode_batch.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/ops/paths.h"

namespace espalier {
namespace {

constexpr int64_t kFirstCapacity = 64;

}  // namespace

int64_t DecodeBatch::add(const Prefix& prefix) {
  ESPALIER_ASSERT(prefix->hidden.defined());
  if (free_slots_.empty()) free_slots_.push_back(used_slots_++);
  const auto place = std::ranges::upper_bound(
      live_, *prefix, is_before, [](const Live& live) -> const PrefixNode& { return *live.prefix; });
  changed_ = true;
  const auto added = live_.insert(place, {prefix, free_slots_.back(), 0, -1});
  free_slots_.pop_back();
  return added - live_.begin();
}

void DecodeBatch::keep(const std::vector<bool>& keep) {
  ESPALIER_ASSERT(keep.size() == live_.size());
  std::vector<Live> kept;
  for (size_t i = 0; i < live_.size(); ++i) {
    if (keep[i]) {
      kept.push_back(std::move(live_[i]));
    } else {
      free_slots_.push_back(live_[i].slot);
    }
  }
  changed_ |= kept.size() < live_.size();
  live_ = std::move(kept);
  if (!live_.empty()) return;
  tails_.clear();
  pass_ = {};
  last_ = {};
  free_slots_.clear();
  slots_ = used_slots_ = capacity_ = 0;
}

void DecodeBatch::store(int64_t sequence, std::span<const int32_t> tokens) {
  const Live& live = live_[sequence];
  ESPALIER_ASSERT(static_cast<int64_t>(tokens.size()) == live.length && live.length > 0 && !changed_);
  const int64_t first = live.prefix->end();
  Encoded own{.context = last_.context, .hidden = last_.hidden};
  for (size_t layer = 0; layer < tails_.size(); ++layer) {
    for (size_t i = 0; i < tails_[layer].size(); ++i)
      own.context[layer][i] = tails_[layer][i].select(0, live.slot);
  }
  const Prefix end = tree_->add(live.prefix, tokens, std::numeric_limits<int64_t>::max());
  for (Prefix node = end; node != live.prefix; node = node->parent) {
    tree_->set(node, own, node->begin - first, node == end ? sequence : -1);
  }
}

// Doubles what is too small of the number of tails and of their capacity.
void DecodeBatch::grow_tails() {
  const int64_t slots = slots_, capacity = capacity_;
  if (used_slots_ > slots_) slots_ = std::max(used_slots_, 2 * slots_);
  const bool is_full = std::ranges::any_of(live_, [&](const Live& live) { return live.length == capacity_; });
  if (is_full) capacity_ = std::max(kFirstCapacity, 2 * capacity_);
  if (slots == slots_ && capacity == capacity_) return;
  tails_.resize(decoder_.num_layers());
  for (size_t layer = 0; layer < tails_.size(); ++layer) {
    LayerContext grown;
    for (const at::Tensor& like : live_.front().prefix->keys[layer]) {
      grown.push_back(at::empty({slots_, capacity_, like.size(1), like.size(2)}, like.options()));
    }
    for (size_t i = 0; i < tails_[layer].size(); ++i) {
      grown[i].narrow(0, 0, slots).narrow(1, 0, capacity).copy_(tails_[layer][i]);
    }
    tails_[layer] = std::move(grown);
  }
}

// Gathers the states of live sequences: those of the last step, and those of prefixes.
void DecodeBatch::update_states() {
  if (!changed_) {
    pass_.states = last_.context;
    return;
  }
  std::vector<const PrefixNode*> begun;
  std::vector<int64_t> order;
  const int64_t stepped = last_.hidden.defined() ? last_.hidden.size(0) : 0;
  for (const Live& live : live_) {
    order.push_back(live.state >= 0 ? live.state : stepped + static_cast<int64_t>(begun.size()));
    if (live.state < 0) begun.push_back(live.prefix.get());
  }
  const at::Tensor index = detail::to_indices(order, decoder_.device());
  const std::vector<bool>& recurrent = tree_->recurrent();
  pass_.states = states_of(begun, recurrent);
  for (size_t layer = 0; layer < recurrent.size(); ++layer) {
    LayerContext& states = pass_.states[layer];
    if (!recurrent[layer]) continue;
    for (size_t i = 0; i < std::max(states.size(), stepped > 0 ? last_.context[layer].size() : 0); ++i) {
      std::vector<at::Tensor> parts;
      if (stepped > 0) parts.push_back(last_.context[layer][i]);
      if (!begun.empty()) parts.push_back(states[i]);
      if (states.size() <= i) states.emplace_back();
      states[i] = at::cat(parts).index_select(0, index);
    }
  }
}

at::Tensor DecodeBatch::step(const std::vector<int32_t>& tokens) {
  RECORD_USER_SCOPE("decode step");
  const at::NoGradGuard no_grad;
  ESPALIER_ASSERT(!live_.empty() && tokens.size() == live_.size());
  grow_tails();
  update_states();
  std::vector<Continuation::Rows> rows;
  std::vector<int64_t> tail_rows, begin(live_.size() + 1);
  pass_.ids.assign(tokens.begin(), tokens.end());
  pass_.positions.clear();
  for (int64_t i = 0; i < num_live(); ++i) {
    const Live& live = live_[i];
    rows.push_back({live.prefix.get(), i, i + 1});
    pass_.positions.push_back(live.prefix->end() + live.length);
    tail_rows.push_back(live.slot * capacity_ + live.length);
  }
  pass_.see(rows);
  std::iota(begin.begin(), begin.end(), 0);
  pass_.structure = make_node_structure(begin, std::vector<int64_t>(live_.size(), -1));
  pass_.structure.cuts.assign(begin.begin(), begin.end() - 1);
  pass_.subtree_end.assign(begin.begin() + 1, begin.end());
  for (int64_t i = 0; i < num_live(); ++i) {
    const int64_t first = live_[i].slot * capacity_;
    pass_.structure.prev[i] = detail::continues(i);
    if (live_[i].length > 0) pass_.see_tail(i, first, first + live_[i].length, live_[i].prefix->end());
  }
  pass_.tails.assign(tails_.size(), {});
  for (size_t layer = 0; layer < tails_.size(); ++layer) {
    for (const at::Tensor& tail : tails_[layer]) pass_.tails[layer].push_back(tail.flatten(0, 1));
  }
  last_ = pass_.run(decoder_);
  const at::Tensor index = detail::to_indices(tail_rows, decoder_.device());
  for (size_t layer = 0; layer < tails_.size(); ++layer) {
    for (size_t i = 0; i < tails_[layer].size(); ++i) {
      pass_.tails[layer][i].index_copy_(0, index, last_.context[layer][i]);
    }
  }
  for (int64_t i = 0; i < num_live(); ++i) {
    ++live_[i].length;
    live_[i].state = i;
  }
  changed_ = false;
  return last_.hidden;
}

}  // namespace espalier
