// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/sampling.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/interrupt.h"
#include "espalier/base/option_names.h"
#include "espalier/ops/parallel.h"
#include "espalier/ops/paths.h"
#include "espalier/runtime/device.h"
#include "espalier/runtime/stopwatch.h"
#include "espalier/sample/sampling_state.h"

namespace espalier {
namespace {

constexpr int64_t kFirstCapacity = 64;        // of tails
constexpr int64_t kLogitsOfThread = 1 << 15;  // that are worth a thread

/// Runs `body`, and adds and returns its seconds.
template <class Body>
double timed(at::Device device, double* seconds, const Body& body) {
  Stopwatch stopwatch(device);
  stopwatch.start();
  body();
  stopwatch.stop();
  synchronize(device);
  *seconds += stopwatch.seconds();
  return stopwatch.seconds();
}

SamplingMemory whole(SamplingMemory memory, const Decoder& decoder) {
  if (!memory.tree) memory.tree = std::make_shared<PrefixTree>(decoder.config(), /*budget=*/0);
  if (!memory.weights) memory.weights = std::make_shared<ReadyWeights>();
  if (!memory.counts) memory.counts = std::make_shared<SamplingCounts>();
  return memory;
}

}  // namespace

Sampling::Sampling(const Decoder& decoder, const SampleOptions& sizes, SamplingMemory memory)
    : decoder_(decoder),
      batch_size_(sizes.batch_size),
      token_budget_(sizes.token_budget),
      pass_tokens_(sizes.pass_tokens),
      places_(sizes.batch_size),
      memory_(whole(std::move(memory), decoder)) {
  for (const auto& [name, value] :
       {std::pair("batch-size", batch_size_), std::pair("token-budget", token_budget_),
        std::pair("pass-tokens", pass_tokens_)}) {
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

void Sampling::add(int64_t row, std::span<const int32_t> prompt, const SampleOptions& options, int64_t place,
                   int64_t client) {
  const auto size = static_cast<int64_t>(prompt.size()), limit = decoder_.config().max_position_embeddings;
  int64_t most = options.max_new_tokens;
  if (limit > 0) most = std::min(most, limit - size);
  clients_[client].waiting.push_back(std::make_shared<Prompt>(
      Prompt{row, place, client, weights_, {prompt.begin(), prompt.end()}, options, most}));
}

bool Sampling::is_idle() const {
  return clients_.empty() && live_.empty();
}

bool Sampling::uses(int64_t number) const {
  const auto has = [&](const auto& prompt) { return prompt->weights.number == number; };
  return std::ranges::any_of(live_, has, &Sequence::prompt) ||
         std::ranges::any_of(clients_, [&](const auto& each) {
           const Client& client = each.second;
           return std::ranges::any_of(client.waiting, has) || std::ranges::any_of(client.encoding, has) ||
                  std::ranges::any_of(client.ready, has);
         });
}

std::vector<Completion> Sampling::step(const TokenWatch& watch) {
  const accumulating::PreparedWeights prepared(std::move(*memory_.weights));
  const at::NoGradGuard no_grad;
  try {
    check_interrupt();
    admit();
    if (encodes_now()) {
      encoded_seconds_ += timed(decoder_.device(), &memory_.counts->prompt_seconds, [&] { encode_some(); });
    }
    decoded_seconds_ += timed(decoder_.device(), &memory_.counts->decode_seconds, [&] {
      begin(watch);
      if (!live_.empty()) decode(watch);
    });
  } catch (...) {
    clear();
    throw;
  }
  forget_idle_clients();
  if (!done_.empty()) memory_.tree->trim();
  *memory_.weights = std::move(*accumulating::PreparedWeights::find());
  return std::exchange(done_, {});
}

// Samples first tokens, which the prompts predict. Sequences that do not end there become live.
void Sampling::begin(const TokenWatch& watch) {
  std::vector<Sequence> sequences = next_sequences();
  if (sequences.empty()) return;
  std::vector<at::Tensor> hidden;
  std::vector<int64_t> row;  // of the logits
  for (const Sequence& each : sequences) {
    if (hidden.empty() || !hidden.back().is_same(each.prompt->prefix->hidden))
      hidden.push_back(each.prompt->prefix->hidden);
    row.push_back(std::ssize(hidden) - 1);
  }
  std::vector<accumulating::AdapterMapsPtr> adapters(hidden.size());
  for (size_t i = 0; i < row.size(); ++i) adapters[row[i]] = sequences[i].prompt->weights.adapter;
  at::Tensor logits;
  if (const std::exception_ptr error = error_of([&] { logits = logits_of(at::cat(hidden), adapters); })) {
    pause(std::move(sequences), error);
    return;
  }
  choose(logits, row, watch, &sequences);
  for (Sequence& sequence : sequences) {
    std::vector<double>& scores = sequence.completion.prompt_logprobs;
    for (const PrefixNode* node = sequence.prompt->prefix.get();
         sequence.prompt->options.prompt_logprobs && !node->is_root(); node = node->parent.get()) {
      scores.insert(scores.begin(), node->logprobs.begin(), node->logprobs.end());
    }
    if (sequence.completion.error) continue;
    if (sequence.is_done()) {
      done_.push_back(std::move(sequence.completion));
    } else {
      go_live(std::move(sequence));
    }
  }
  fail_broken(sequences);
}

void Sampling::go_live(Sequence sequence) {
  if (tails_.free_slots.empty()) tails_.free_slots.push_back(tails_.used_slots++);
  sequence.slot = tails_.free_slots.back();
  tails_.free_slots.pop_back();
  sequence.stepped = ++steps_;
  const auto place = std::ranges::upper_bound(live_, sequence.prompt->key(), {},
                                              [](const Sequence& each) { return each.prompt->key(); });
  live_.insert(place, std::move(sequence));
}

// Doubles what is too small of the number of tails and of their capacity.
void Sampling::grow_tails() {
  const int64_t slots = tails_.slots, capacity = tails_.capacity;
  if (tails_.used_slots > tails_.slots) tails_.slots = std::max(tails_.used_slots, 2 * tails_.slots);
  const bool is_full = std::ranges::any_of(live_, [&](const Sequence& each) {
    return static_cast<int64_t>(each.tail().size()) == tails_.capacity;
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

// The states of live sequences, by layer: those of their last steps, and those of prompts.
std::vector<LayerContext> Sampling::states() const {
  std::vector<const PrefixNode*> begun;
  std::map<const Encoded*, int64_t> first;  // row of what is continued, by the step
  std::vector<const Encoded*> steps;
  std::vector<int64_t> order;
  int64_t stepped = 0;
  for (const Sequence& each : live_) {
    if (!each.last || !first.emplace(each.last.get(), stepped).second) continue;
    steps.push_back(each.last.get());
    stepped += each.last->hidden.size(0);
  }
  for (const Sequence& each : live_) {
    order.push_back(each.last ? first.at(each.last.get()) + each.state
                              : stepped + static_cast<int64_t>(begun.size()));
    if (!each.last) begun.push_back(each.prompt->prefix.get());
  }
  if (begun.empty() && steps.size() == 1 && std::ssize(order) == stepped && std::ranges::is_sorted(order))
    return steps.front()->context;  // all, in their order
  const at::Tensor index = detail::to_indices(order, decoder_.device());
  const std::vector<bool>& recurrent = memory_.tree->recurrent();
  std::vector<LayerContext> states = states_of(begun, recurrent);
  for (size_t layer = 0; layer < recurrent.size(); ++layer) {
    if (!recurrent[layer]) continue;
    if (begun.empty()) states[layer].resize(steps.front()->context[layer].size());
    for (size_t i = 0; i < states[layer].size(); ++i) {
      std::vector<at::Tensor> parts;
      for (const Encoded* step : steps) parts.push_back(step->context[layer][i]);
      if (!begun.empty()) parts.push_back(states[layer][i]);
      states[layer][i] = at::cat(parts).index_select(0, index);
    }
  }
  return states;
}

// One token of each live sequence whose turn it is.
void Sampling::decode(const TokenWatch& watch) {
  RECORD_USER_SCOPE("decode step");
  std::vector<Sequence> resting = take_resting();
  at::Tensor logits;
  const std::exception_ptr error = error_of([&] { logits = forward(); });
  if (error) {
    // Memory that others have is given back, too.
    std::ranges::move(resting, std::back_inserter(live_));
    pause(std::exchange(live_, {}), error);
    return;
  }
  ++memory_.counts->decode_steps;
  ++steps_;
  std::vector<int64_t> row(live_.size());
  std::iota(row.begin(), row.end(), 0);
  choose(logits, row, watch, &live_);
  std::vector<Sequence> rest, broken;
  for (Sequence& sequence : live_) {
    sequence.stepped = steps_;
    if (sequence.completion.error) {
      tails_.free_slots.push_back(sequence.slot);
      broken.push_back(std::move(sequence));
    } else if (!sequence.is_done()) {
      rest.push_back(std::move(sequence));
    } else {
      tails_.free_slots.push_back(sequence.slot);
      if (memory_.tree->keeps()) error_of([&] { keep(sequence); });
      done_.push_back(std::move(sequence.completion));
    }
  }
  live_.clear();
  std::merge(std::make_move_iterator(rest.begin()), std::make_move_iterator(rest.end()),
             std::make_move_iterator(resting.begin()), std::make_move_iterator(resting.end()),
             std::back_inserter(live_),
             [](const Sequence& a, const Sequence& b) { return a.prompt->key() < b.prompt->key(); });
  fail_broken(broken);
  if (live_.empty()) tails_ = {};
  have_more_places();
}

// The pass of a step: each live sequence is a root that continues its prompt and its tail. Returns the
// logits.
at::Tensor Sampling::forward() {
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
    const auto length = static_cast<int64_t>(live_[i].tail().size());
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
  const auto last = std::make_shared<const Encoded>(pass.run(decoder_));
  const at::Tensor index = detail::to_indices(tail_rows, decoder_.device());
  for (size_t layer = 0; layer < tails_.keys.size(); ++layer) {
    for (size_t i = 0; i < tails_.keys[layer].size(); ++i) {
      pass.tails[layer][i].index_copy_(0, index, last->context[layer][i]);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    live_[i].last = last;
    live_[i].state = i;
  }
  return logits_of(last->hidden, pass.adapters);
}

// Makes the tail of a sequence, which has just ended, a part of the tree.
void Sampling::keep(const Sequence& sequence) {
  Encoded own = *sequence.last;
  for (size_t layer = 0; layer < tails_.keys.size(); ++layer) {
    for (size_t i = 0; i < tails_.keys[layer].size(); ++i) {
      own.context[layer][i] = tails_.keys[layer][i].select(0, sequence.slot);
    }
  }
  const Prefix& prompt = sequence.prompt->prefix;
  const Prefix end = memory_.tree->add(prompt, sequence.tail(), std::numeric_limits<int64_t>::max());
  for (Prefix node = end; node != prompt; node = node->parent) {
    const int64_t first = node->begin - prompt->end();
    memory_.tree->set(node, own, first, node == end ? sequence.state : -1);
    const double temperature = sequence.prompt->options.choice.temperature;
    if ((temperature != 0 && temperature != 1) || !node->logprobs.empty()) continue;
    const auto logprobs = sequence.completion.logprobs.begin() + sequence.prompt->folded + first;
    node->logprobs.assign(logprobs, logprobs + node->size());
  }
}

/// Logits [B, V] of hidden states on the host, in the accumulator dtype; each with its adapter.
at::Tensor Sampling::logits_of(const at::Tensor& hidden,
                               const std::vector<accumulating::AdapterMapsPtr>& adapters) const {
  const accumulating::RowAdapterScope scope(accumulating::RowAdapters(adapters, {}));
  const at::Tensor logits = accumulating::head_logits(decoder_.final_norm(hidden), decoder_.lm_head());
  return decoder_.capped(logits).cpu();
}

/// Chooses a token for each sequence from its row of the logits, in parallel. A row that is not finite is an
/// error of its sequence.
void Sampling::choose(const at::Tensor& logits, std::span<const int64_t> row, const TokenWatch& watch,
                      std::vector<Sequence>* sequences) {
  std::vector<double> truncation(sequences->size());
  const auto choose_as = [&]<class Scalar>(Scalar) {
    const at::Tensor rows = logits.contiguous();
    const auto width = static_cast<size_t>(rows.size(1));
    parallel_ranges(
        std::ssize(*sequences), std::max<int64_t>(1, kLogitsOfThread / rows.size(1)),
        [&](int64_t begin, int64_t end) {
          TokenChooser chooser((*sequences)[begin].prompt->options.choice);
          for (int64_t i = begin; i < end; ++i) {
            Sequence& sequence = (*sequences)[i];
            const SampleOptions& own = sequence.prompt->options;
            if (i > begin && own.choice != (*sequences)[i - 1].prompt->options.choice) {
              chooser = TokenChooser(own.choice);
            }
            const std::span<const Scalar> values(rows.const_data_ptr<Scalar>() + row[i] * width, width);
            TokenChoice chosen;
            try {
              chosen = chooser.choose(values, sequence.rng.uniform());
            } catch (const InputError&) {
              sequence.completion.error = std::current_exception();
              continue;
            }
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
  for (const double each : truncation) memory_.counts->truncation += each;
  std::vector<const Completion*> completions;
  std::vector<Sequence*> chosen;
  for (Sequence& sequence : *sequences) {
    if (sequence.completion.error) continue;
    completions.push_back(&sequence.completion);
    chosen.push_back(&sequence);
  }
  memory_.counts->sampled_tokens += std::ssize(chosen);
  if (!watch || chosen.empty()) return;
  const std::vector<bool> ends = watch(completions);
  for (size_t i = 0; i < ends.size(); ++i) chosen[i]->completion.stopped |= ends[i];
}

void Sampling::clear() {
  clients_.clear();
  live_.clear();
  done_.clear();
  tails_ = {};
  memory_.tree->trim();
}

}  // namespace espalier
