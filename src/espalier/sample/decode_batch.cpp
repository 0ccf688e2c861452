// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/decode_batch.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/paths.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

constexpr int64_t kFirstCapacity = 64;

at::Tensor to_tensor(const std::vector<int64_t>& numbers, at::IntArrayRef shape) {
  return at::tensor(numbers, at::kLong).view(shape);
}

}  // namespace

/// One token of each live sequence: roots that continue prompts and tails.
class DecodeBatch::Sequence : public SequenceOps {
 public:
  explicit Sequence(const DecodeBatch& batch) : batch_(batch) {}

  at::Tensor attention(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOptions& options) const override {
    AttentionContext context;
    for (int64_t s = 0; s < batch_.prompts_.num_segments(); ++s) {
      const LayerContext& segment = batch_.prompts_.segment(s, layer);
      context.k.push_back(segment[0]);
      context.v.push_back(segment[1]);
    }
    context.k.push_back(batch_.tails_[layer][0].flatten(0, 1));
    context.v.push_back(batch_.tails_[layer][1].flatten(0, 1));
    context.blocks = blocks;
    context.positions = positions;
    return tree_attention(q, k, v, tokens, options, context);
  }

  const NodeStructure& nodes() const override { return nodes_of_tokens; }
  std::vector<at::Tensor> cut_context(int64_t layer) const override { return batch_.states_[layer]; }

  at::Tensor blocks, positions;  // of AttentionContext
  ForestTokens tokens;
  NodeStructure nodes_of_tokens;

 private:
  const DecodeBatch& batch_;
};

DecodeBatch::DecodeBatch(const Decoder& decoder, const EncodedPrompts& prompts, int64_t max_live)
    : decoder_(decoder),
      prompts_(prompts),
      recurrent_(recurrent_layers(decoder.config())),
      max_live_(max_live),
      free_slots_(max_live),
      tails_(decoder.num_layers()),
      states_(decoder.num_layers()),
      sequence_(std::make_unique<Sequence>(*this)) {
  std::iota(free_slots_.rbegin(), free_slots_.rend(), 0);
  grow_tails();
}

DecodeBatch::~DecodeBatch() = default;

void DecodeBatch::add(int64_t prompt) {
  ESPALIER_ASSERT(!free_slots_.empty() && prompt < prompts_.num_prompts());
  live_.push_back({prompt, free_slots_.back(), 0});
  free_slots_.pop_back();
  state_of_.push_back(-1 - prompt);
  changed_ = true;
}

void DecodeBatch::keep(const std::vector<bool>& keep) {
  ESPALIER_ASSERT(keep.size() == live_.size());
  size_t kept = 0;
  for (size_t i = 0; i < live_.size(); ++i) {
    if (!keep[i]) {
      free_slots_.push_back(live_[i].slot);
      changed_ = true;
      continue;
    }
    live_[kept] = live_[i];
    state_of_[kept++] = state_of_[i];
  }
  live_.resize(kept);
  state_of_.resize(kept);
}

// Doubles the capacity of all tails.
void DecodeBatch::grow_tails() {
  const int64_t before = capacity_;
  capacity_ = std::max(kFirstCapacity, 2 * capacity_);
  for (size_t layer = 0; layer < tails_.size(); ++layer) {
    if (recurrent_[layer]) continue;
    LayerContext grown;
    for (const at::Tensor& like : prompts_.segment(0, static_cast<int64_t>(layer))) {
      grown.push_back(at::empty({max_live_, capacity_, like.size(1), like.size(2)}, like.options()));
    }
    for (size_t i = 0; i < tails_[layer].size(); ++i) grown[i].narrow(1, 0, before).copy_(tails_[layer][i]);
    tails_[layer] = std::move(grown);
  }
}

// A key range is visible to the sequences whose paths contain it, which are consecutive. Ranges that are
// adjacent on a path and visible to the same sequences are merged.
void DecodeBatch::update_prompt_blocks() {
  struct Block {
    KeyRange keys;
    int64_t row_begin, row_end;
  };
  std::vector<Block> blocks;
  std::vector<size_t> open;  // the blocks of the previous path, from its root
  for (size_t i = 0; i < live_.size(); ++i) {
    const auto path = prompts_.paths().row(live_[i].prompt);
    const auto row = static_cast<int64_t>(i);
    size_t shared = 0;
    while (shared < std::min(open.size(), path.size()) && blocks[open[shared]].keys == path[shared]) {
      blocks[open[shared++]].row_end = row + 1;
    }
    open.resize(shared);
    for (size_t depth = shared; depth < path.size(); ++depth) {
      open.push_back(blocks.size());
      blocks.push_back({path[depth], row, row + 1});
    }
  }
  prompt_blocks_.clear();
  block_positions_.clear();
  for (size_t i = 0; i < blocks.size();) {
    KeyRange keys = blocks[i].keys;
    size_t next = i + 1;
    for (; next < blocks.size(); ++next) {
      const Block& other = blocks[next];
      const bool joins = other.keys.segment == keys.segment && other.keys.begin == keys.end &&
                         other.keys.position == keys.position + keys.end - keys.begin &&
                         other.row_begin == blocks[i].row_begin && other.row_end == blocks[i].row_end;
      if (!joins) break;
      keys.end = other.keys.end;
    }
    prompt_blocks_.insert(prompt_blocks_.end(),
                          {keys.segment, keys.begin, keys.end, blocks[i].row_begin, blocks[i].row_end});
    block_positions_.push_back(keys.position);
    i = next;
  }
}

// Gathers the states of live sequences. Sequences that have been stepped precede those that have not.
void DecodeBatch::update_states() {
  std::vector<int64_t> stepped, begun;
  for (const int64_t state : state_of_) {
    if (state >= 0) {
      stepped.push_back(state);
    } else {
      begun.push_back(-1 - state);
    }
  }
  const at::Tensor stepped_index = at::tensor(stepped, at::kLong).to(decoder_.device());
  const at::Tensor prompt_index = at::tensor(begun, at::kLong).to(decoder_.device());
  for (size_t layer = 0; layer < states_.size(); ++layer) {
    if (!recurrent_[layer]) continue;
    const LayerContext& prompt_states = prompts_.states(static_cast<int64_t>(layer));
    for (size_t i = 0; i < prompt_states.size(); ++i) {
      std::vector<at::Tensor> parts;
      if (!stepped.empty()) parts.push_back(states_[layer][i].index_select(0, stepped_index));
      if (!begun.empty()) parts.push_back(prompt_states[i].index_select(0, prompt_index));
      if (states_[layer].size() <= i) states_[layer].emplace_back();
      states_[layer][i] = at::cat(parts);
    }
  }
  std::iota(state_of_.begin(), state_of_.end(), 0);
}

void DecodeBatch::set_tail_blocks() {
  std::vector<int64_t> blocks = prompt_blocks_, positions = block_positions_;
  for (size_t i = 0; i < live_.size(); ++i) {
    if (live_[i].length == 0) continue;
    const int64_t begin = live_[i].slot * capacity_, row = static_cast<int64_t>(i);
    blocks.insert(blocks.end(), {prompts_.num_segments(), begin, begin + live_[i].length, row, row + 1});
    positions.push_back(prompts_.size(live_[i].prompt));
  }
  sequence_->blocks = to_tensor(blocks, {-1, 5});
  sequence_->positions = to_tensor(positions, {-1});
}

at::Tensor DecodeBatch::step(const std::vector<int32_t>& tokens) {
  RECORD_USER_SCOPE("decode step");
  const at::NoGradGuard no_grad;
  ESPALIER_ASSERT(!live_.empty() && tokens.size() == live_.size());
  const int64_t count = num_live();
  if (std::ranges::any_of(live_, [&](const Live& live) { return live.length == capacity_; })) grow_tails();
  if (changed_) {
    update_prompt_blocks();
    update_states();
    std::vector<int64_t> begin(count + 1);
    std::iota(begin.begin(), begin.end(), 0);
    NodeStructure& nodes = sequence_->nodes_of_tokens;
    nodes = make_node_structure(begin, std::vector<int64_t>(count, -1));
    nodes.cuts.assign(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < count; ++i) nodes.prev[i] = detail::continues(i);
    changed_ = false;
  }
  set_tail_blocks();
  std::vector<int64_t> ids(tokens.begin(), tokens.end()), positions, tail_rows;
  for (const Live& live : live_) {
    positions.push_back(prompts_.size(live.prompt) + live.length);
    tail_rows.push_back(live.slot * capacity_ + live.length);
  }
  const at::Tensor position = at::tensor(positions, at::kLong);
  const std::vector<at::Tensor> inputs =
      upload({at::tensor(ids, at::kLong), position, at::tensor(tail_rows, at::kLong), position.to(at::kInt),
              at::arange(1, count + 1, at::kInt)},
             decoder_.device());
  sequence_->tokens = {.subtree_end = inputs[4], .position = inputs[3]};
  const PositionTables tables = decoder_.position_tables(inputs[1]);
  at::Tensor hidden = decoder_.embed(inputs[0]);
  for (int64_t layer = 0; layer < decoder_.num_layers(); ++layer) {
    LayerOutput output = decoder_.layer(layer, hidden, tables, *sequence_);
    hidden = std::move(output.hidden);
    if (recurrent_[layer]) {
      states_[layer] = std::move(output.context);
      continue;
    }
    for (size_t i = 0; i < output.context.size(); ++i) {
      tails_[layer][i].flatten(0, 1).index_copy_(0, inputs[2], output.context[i]);
    }
  }
  for (Live& live : live_) ++live.length;
  return hidden;
}

}  // namespace espalier
