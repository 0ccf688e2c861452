// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/sampling.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/interrupt.h"
#include "espalier/base/option_names.h"
#include "espalier/base/rng.h"
#include "espalier/ops/parallel.h"
#include "espalier/ops/paths.h"
#include "espalier/runtime/device.h"
#include "espalier/runtime/stopwatch.h"

namespace espalier {
namespace {

// Tokens of prompts in a pass: enough for full speed, few enough for little activation memory.
constexpr int64_t kPassTokens = 4096;
constexpr int64_t kFirstCapacity = 64;        // of tails
constexpr int64_t kLogitsOfThread = 1 << 15;  // that are worth a thread

/// Runs `body` and adds its seconds.
template <class Body>
void timed(at::Device device, double* seconds, const Body& body) {
  Stopwatch stopwatch(device);
  stopwatch.start();
  body();
  stopwatch.stop();
  synchronize(device);
  *seconds += stopwatch.seconds();
}

SamplingMemory whole(SamplingMemory memory, const Decoder& decoder) {
  if (!memory.tree) memory.tree = std::make_shared<PrefixTree>(decoder.config(), /*budget=*/0);
  if (!memory.weights) memory.weights = std::make_shared<ReadyWeights>();
  if (!memory.counts) memory.counts = std::make_shared<SamplingCounts>();
  return memory;
}

}  // namespace

struct Sampling::Prompt {
  int64_t row, place;
  SampledWeights weights;
  std::vector<int32_t> tokens;
  SampleOptions options;
  int64_t most;       // tokens of a completion
  int64_t begun = 0;  // samples
  int64_t kept_tokens = 0;
  Prefix prefix{};  // once it has room

  std::vector<Prefix> unencoded(PrefixTree& tree) const {
    return tree.unencoded(prefix, options.prompt_logprobs);
  }
  /// Sorts prompts by weights, then in preorder.
  auto key() const { return std::tie(weights.number, tokens); }
};

struct Sampling::Sequence {
  Completion completion;
  std::shared_ptr<Prompt> prompt;
  Rng rng;
  int64_t slot = -1;   // index into the tails
  int64_t state = -1;  // row of the last step; -1: before the first one

  std::span<const int32_t> given() const {
    return std::span(completion.tokens).first(completion.tokens.size() - 1);
  }
  bool is_done() const {
    return completion.stopped || static_cast<int64_t>(completion.tokens.size()) == prompt->most;
  }
};

Sampling::Sampling(const Decoder& decoder, const SampleOptions& sizes, SamplingMemory memory)
    : decoder_(decoder),
      batch_size_(sizes.batch_size),
      token_budget_(sizes.token_budget),
      memory_(whole(std::move(memory), decoder)) {
  for (const auto& [name, value] :
       {std::pair("batch-size", batch_size_), std::pair("token-budget", token_budget_)}) {
    ESPALIER_CHECK(value >= 1, "{}: expected 1 or more, received {}", name, value);
  }
}

Sampling::~Sampling() {
  clear();
}

void Sampling::check(const Decoder& decoder, int64_t row, int64_t prompt_size, const SampleOptions& options) {
  const int64_t most = decoder.config().max_position_embeddings;
  ESPALIER_CHECK(most == 0 || prompt_size < most,
                 "trajectory {}: expected a prompt of fewer than {} tokens (max_position_embeddings), "
                 "received {}",
                 row, most, prompt_size);
  ESPALIER_CHECK(options.samples >= 1, "samples: expected 1 or more, received {}", options.samples);
  ESPALIER_CHECK(options.max_new_tokens >= 1, "max-new-tokens: expected 1 or more, received {}",
                 options.max_new_tokens);
  for (const int32_t id : options.stop_ids) {
    ESPALIER_CHECK(0 <= id && id < decoder.vocab_size(),
                   "{}: expected ids below the vocabulary size {}, received {}", named("stop-id"),
                   decoder.vocab_size(), id);
  }
  TokenChooser{options.choice};  // throws if an option is out of range
}

void Sampling::add(int64_t row, std::span<const int32_t> prompt, const SampleOptions& options,
                   int64_t place) {
  const auto size = static_cast<int64_t>(prompt.size()), limit = decoder_.config().max_position_embeddings;
  int64_t most = options.max_new_tokens;
  if (limit > 0) most = std::min(most, limit - size);
  waiting_.push_back(
      std::make_shared<Prompt>(Prompt{row, place, weights_, {prompt.begin(), prompt.end()}, options, most}));
}

bool Sampling::uses(int64_t number) const {
  const auto has = [&](const auto& prompt) { return prompt->weights.number == number; };
  return std::ranges::any_of(waiting_, has) || std::ranges::any_of(encoding_, has) ||
         std::ranges::any_of(ready_, has) || std::ranges::any_of(live_, has, &Sequence::prompt);
}

std::vector<Completion> Sampling::step(const TokenWatch& watch) {
  const accumulating::PreparedWeights prepared(std::move(*memory_.weights));
  const at::NoGradGuard no_grad;
  try {
    check_interrupt();
    admit();
    if (!encoding_.empty()) {
      timed(decoder_.device(), &memory_.counts->prompt_seconds, [&] { encode_some(); });
    }
    timed(decoder_.device(), &memory_.counts->decode_seconds, [&] {
      begin(watch);
      if (!live_.empty()) decode(watch);
    });
  } catch (...) {
    clear();
    throw;
  }
  if (!done_.empty()) memory_.tree->trim();
  *memory_.weights = std::move(*accumulating::PreparedWeights::find());
  return std::exchange(done_, {});
}

// Gives prompts room in their turn, as long as what is held has few enough tokens.
void Sampling::admit() {
  if (waiting_.empty()) return;
  std::unordered_set<const PrefixNode*> held;
  int64_t tokens = 0;
  const auto hold = [&](const Prompt& prompt) {
    const PrefixNode* node = prompt.prefix.get();
    for (; !node->is_root() && held.insert(node).second; node = node->parent.get()) tokens += node->size();
  };
  for (const auto* prompts : {&encoding_, &ready_}) {
    for (const auto& prompt : *prompts) hold(*prompt);
  }
  for (const Sequence& sequence : live_) hold(*sequence.prompt);
  for (; !waiting_.empty(); waiting_.pop_front()) {
    Prompt& next = *waiting_.front();
    const bool is_first = held.empty();
    const Prefix root = memory_.tree->root(next.weights.number);
    next.prefix = memory_.tree->add(root, next.tokens, std::min(kPassTokens, token_budget_));
    hold(next);
    if (tokens > token_budget_ && !is_first) {
      next.prefix.reset();
      return;
    }
    next.kept_tokens = next.prefix->end();
    for (const Prefix& node : next.unencoded(*memory_.tree)) next.kept_tokens -= node->size();
    memory_.counts->kept_prompt_tokens += next.kept_tokens;
    encoding_.push_back(std::move(waiting_.front()));
  }
}

void Sampling::encode_some() {
  struct Taken {
    Prefix node;
    const Prompt* prompt;
  };
  std::map<std::pair<int64_t, std::vector<int32_t>>, Taken> by_path;  // of each weights; which is preorder
  std::unordered_set<const PrefixNode*> taken;
  int64_t tokens = 0;
  bool scored = false;
  const auto take = [&](const Prompt& prompt) {
    scored |= prompt.options.prompt_logprobs;
    for (const Prefix& node : prompt.unencoded(*memory_.tree)) {
      if (taken.contains(node.get())) continue;
      if (tokens > 0 && tokens + node->size() > std::min(kPassTokens, token_budget_)) return false;
      taken.insert(node.get());
      by_path[{prompt.weights.number, {prompt.tokens.begin(), prompt.tokens.begin() + node->end()}}] = {
          node, &prompt};
      tokens += node->size();
    }
    return true;
  };
  for (const auto& prompt : encoding_) {
    if (!take(*prompt)) break;
  }
  std::vector<Prefix> nodes;
  std::vector<accumulating::AdapterMapsPtr> adapters;
  for (auto& [path, taken] : by_path) {
    nodes.push_back(std::move(taken.node));
    adapters.push_back(taken.prompt->weights.adapter);
  }
  if (!nodes.empty()) encode(decoder_, nodes, adapters, scored, memory_.tree.get());
  memory_.counts->encoded_prompt_tokens += tokens;
  memory_.tree->trim();
  for (; !encoding_.empty() && encoding_.front()->unencoded(*memory_.tree).empty(); encoding_.pop_front()) {
    ready_.push_back(std::move(encoding_.front()));
  }
}

// Samples first tokens, which the prompts predict. Sequences that do not end there become live.
void Sampling::begin(const TokenWatch& watch) {
  std::vector<Sequence> sequences;
  std::vector<at::Tensor> hidden;
  while (!ready_.empty() && static_cast<int64_t>(live_.size() + sequences.size()) < batch_size_) {
    const std::shared_ptr<Prompt> prompt = ready_.front();
    const int64_t sample = prompt->begun++;
    if (prompt->begun == prompt->options.samples) ready_.pop_front();
    memory_.counts->flat_prompt_tokens += prompt->prefix->end();
    hidden.push_back(prompt->prefix->hidden);
    sequences.push_back({{.row = prompt->row, .sample = sample, .kept_tokens = prompt->kept_tokens},
                         prompt,
                         Rng(prompt->options.seed,
                             (static_cast<uint64_t>(prompt->place) << 32) | static_cast<uint64_t>(sample))});
  }
  if (sequences.empty()) return;
  choose(logits_of(at::cat(hidden), sequences), watch, &sequences);
  for (Sequence& sequence : sequences) {
    std::vector<double>& scores = sequence.completion.prompt_logprobs;
    for (const PrefixNode* node = sequence.prompt->prefix.get();
         sequence.prompt->options.prompt_logprobs && !node->is_root(); node = node->parent.get()) {
      scores.insert(scores.begin(), node->logprobs.begin(), node->logprobs.end());
    }
    if (sequence.is_done()) {
      done_.push_back(std::move(sequence.completion));
      continue;
    }
    if (tails_.free_slots.empty()) tails_.free_slots.push_back(tails_.used_slots++);
    sequence.slot = tails_.free_slots.back();
    tails_.free_slots.pop_back();
    const auto place = std::ranges::upper_bound(live_, sequence.prompt->key(), {},
                                                [](const Sequence& each) { return each.prompt->key(); });
    live_.insert(place, std::move(sequence));
  }
}

// Doubles what is too small of the number of tails and of their capacity.
void Sampling::grow_tails() {
  const int64_t slots = tails_.slots, capacity = tails_.capacity;
  if (tails_.used_slots > tails_.slots) tails_.slots = std::max(tails_.used_slots, 2 * tails_.slots);
  const bool is_full = std::ranges::any_of(live_, [&](const Sequence& each) {
    return static_cast<int64_t>(each.given().size()) == tails_.capacity;
  });
  if (is_full) tails_.capacity = std::max(kFirstCapacity, 2 * tails_.capacity);
  if (slots == tails_.slots && capacity == tails_.capacity) return;
  tails_.keys.resize(decoder_.num_layers());
  for (size_t layer = 0; layer < tails_.keys.size(); ++layer) {
    LayerContext grown;
    for (const at::Tensor& like : live_.front().prompt->prefix->keys[layer]) {
      grown.push_back(at::empty({tails_.slots, tails_.capacity, like.size(1), like.size(2)}, like.options()));
    }
    for (size_t i = 0; i < tails_.keys[layer].size(); ++i) {
      grown[i].narrow(0, 0, slots).narrow(1, 0, capacity).copy_(tails_.keys[layer][i]);
    }
    tails_.keys[layer] = std::move(grown);
  }
}

// The states of live sequences, by layer: those of the last step, and those of prompts.
std::vector<LayerContext> Sampling::states() const {
  std::vector<const PrefixNode*> begun;
  std::vector<int64_t> order;
  const int64_t stepped = tails_.last.hidden.defined() ? tails_.last.hidden.size(0) : 0;
  for (const Sequence& each : live_) {
    order.push_back(each.state >= 0 ? each.state : stepped + static_cast<int64_t>(begun.size()));
    if (each.state < 0) begun.push_back(each.prompt->prefix.get());
  }
  if (begun.empty() && static_cast<int64_t>(order.size()) == stepped)
    return tails_.last.context;  // all, in their order
  const at::Tensor index = detail::to_indices(order, decoder_.device());
  const std::vector<bool>& recurrent = memory_.tree->recurrent();
  std::vector<LayerContext> states = states_of(begun, recurrent);
  for (size_t layer = 0; layer < recurrent.size(); ++layer) {
    if (!recurrent[layer]) continue;
    if (begun.empty()) states[layer].resize(tails_.last.context[layer].size());
    for (size_t i = 0; i < states[layer].size(); ++i) {
      std::vector<at::Tensor> parts;
      if (stepped > 0) parts.push_back(tails_.last.context[layer][i]);
      if (!begun.empty()) parts.push_back(states[layer][i]);
      states[layer][i] = at::cat(parts).index_select(0, index);
    }
  }
  return states;
}

// One token of each live sequence, a root that continues its prompt and its tail.
void Sampling::decode(const TokenWatch& watch) {
  RECORD_USER_SCOPE("decode step");
  grow_tails();
  Continuation pass;
  pass.states = states();
  const auto count = static_cast<int64_t>(live_.size());
  std::vector<Continuation::Rows> rows;
  std::vector<int64_t> tail_rows, begin(count + 1);
  std::iota(begin.begin(), begin.end(), 0);
  pass.structure = make_node_structure(begin, std::vector<int64_t>(count, -1));
  pass.structure.cuts.assign(begin.begin(), begin.end() - 1);
  pass.subtree_end.assign(begin.begin() + 1, begin.end());
  for (int64_t i = 0; i < count; ++i) rows.push_back({live_[i].prompt->prefix.get(), i, i + 1});
  pass.see(rows);
  for (int64_t i = 0; i < count; ++i) {
    const auto length = static_cast<int64_t>(live_[i].given().size());
    const int64_t first = live_[i].slot * tails_.capacity, prompt_end = live_[i].prompt->prefix->end();
    pass.adapters.push_back(live_[i].prompt->weights.adapter);
    pass.ids.push_back(live_[i].completion.tokens.back());
    pass.positions.push_back(prompt_end + length);
    pass.structure.prev[i] = detail::continues(i);
    if (length > 0) pass.see_tail(i, first, first + length, prompt_end);
    tail_rows.push_back(first + length);
  }
  pass.tails.resize(tails_.keys.size());
  for (size_t layer = 0; layer < tails_.keys.size(); ++layer) {
    for (const at::Tensor& tail : tails_.keys[layer]) pass.tails[layer].push_back(tail.flatten(0, 1));
  }
  tails_.last = pass.run(decoder_);
  const at::Tensor index = detail::to_indices(tail_rows, decoder_.device());
  for (size_t layer = 0; layer < tails_.keys.size(); ++layer) {
    for (size_t i = 0; i < tails_.keys[layer].size(); ++i) {
      pass.tails[layer][i].index_copy_(0, index, tails_.last.context[layer][i]);
    }
  }
  ++memory_.counts->decode_steps;
  choose(logits_of(tails_.last.hidden, live_), watch, &live_);
  std::vector<Sequence> rest;
  for (int64_t i = 0; i < count; ++i) {
    Sequence& sequence = live_[i];
    sequence.state = i;
    if (!sequence.is_done()) {
      rest.push_back(std::move(sequence));
      continue;
    }
    tails_.free_slots.push_back(sequence.slot);
    if (memory_.tree->keeps()) keep(sequence, i);
    done_.push_back(std::move(sequence.completion));
  }
  live_ = std::move(rest);
  if (live_.empty()) tails_ = {};
}

// Makes the tail of a sequence, that of this row of the last step, a part of the tree.
void Sampling::keep(const Sequence& sequence, int64_t row) {
  Encoded own = tails_.last;
  for (size_t layer = 0; layer < tails_.keys.size(); ++layer) {
    for (size_t i = 0; i < tails_.keys[layer].size(); ++i) {
      own.context[layer][i] = tails_.keys[layer][i].select(0, sequence.slot);
    }
  }
  const Prefix& prompt = sequence.prompt->prefix;
  const Prefix end = memory_.tree->add(prompt, sequence.given(), std::numeric_limits<int64_t>::max());
  for (Prefix node = end; node != prompt; node = node->parent) {
    const int64_t first = node->begin - prompt->end();
    memory_.tree->set(node, own, first, node == end ? row : -1);
    const double temperature = sequence.prompt->options.choice.temperature;
    if ((temperature != 0 && temperature != 1) || !node->logprobs.empty()) continue;
    const auto logprobs = sequence.completion.logprobs.begin() + first;
    node->logprobs.assign(logprobs, logprobs + node->size());
  }
}

/// Logits [B, V] of sequences on the host, in the accumulator dtype.
at::Tensor Sampling::logits_of(const at::Tensor& hidden, const std::vector<Sequence>& sequences) const {
  std::vector<accumulating::AdapterMapsPtr> adapters;
  for (const Sequence& each : sequences) adapters.push_back(each.prompt->weights.adapter);
  const accumulating::RowAdapterScope scope(accumulating::RowAdapters(adapters, {}));
  const at::Tensor logits = accumulating::head_logits(decoder_.final_norm(hidden), decoder_.lm_head());
  return decoder_.capped(logits).cpu();
}

/// Chooses a token for each sequence from its row of logits, rows in parallel.
void Sampling::choose(const at::Tensor& logits, const TokenWatch& watch, std::vector<Sequence>* sequences) {
  std::vector<double> truncation(sequences->size());
  const auto choose_as = [&]<class Scalar>(Scalar) {
    const at::Tensor rows = logits.contiguous();
    const auto width = static_cast<size_t>(rows.size(1));
    parallel_ranges(
        rows.size(0), std::max<int64_t>(1, kLogitsOfThread / rows.size(1)), [&](int64_t begin, int64_t end) {
          TokenChooser chooser((*sequences)[begin].prompt->options.choice);
          for (int64_t i = begin; i < end; ++i) {
            Sequence& sequence = (*sequences)[i];
            const SampleOptions& own = sequence.prompt->options;
            if (i > begin && own.choice != (*sequences)[i - 1].prompt->options.choice) {
              chooser = TokenChooser(own.choice);
            }
            const std::span<const Scalar> row(rows.const_data_ptr<Scalar>() + i * width, width);
            const TokenChoice chosen = chooser.choose(row, sequence.rng.uniform());
            sequence.completion.tokens.push_back(chosen.token);
            sequence.completion.logprobs.push_back(chosen.logprob);
            truncation[i] = chosen.truncation;
            sequence.completion.stopped = std::ranges::find(own.stop_ids, chosen.token) != own.stop_ids.end();
          }
        });
  };
  if (logits.scalar_type() == at::kDouble) {
    choose_as(double());
  } else {
    choose_as(float());
  }
  memory_.counts->sampled_tokens += static_cast<int64_t>(sequences->size());
  for (const double each : truncation) memory_.counts->truncation += each;
  if (!watch) return;
  std::vector<const Completion*> completions;
  for (const Sequence& sequence : *sequences) completions.push_back(&sequence.completion);
  const std::vector<bool> ends = watch(completions);
  for (size_t i = 0; i < ends.size(); ++i) (*sequences)[i].completion.stopped |= ends[i];
}

void Sampling::clear() {
  for (auto* prompts : {&waiting_, &encoding_, &ready_}) prompts->clear();
  live_.clear();
  done_.clear();
  tails_ = {};
  memory_.tree->trim();
}

}  // namespace espalier
