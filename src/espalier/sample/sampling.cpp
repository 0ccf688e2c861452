// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/sampling.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/interrupt.h"
#include "espalier/base/rng.h"
#include "espalier/runtime/device.h"
#include "espalier/runtime/stopwatch.h"
#include "espalier/sample/continuation.h"

namespace espalier {
namespace {

// Tokens of prompts in a pass: enough for full speed, few enough for little activation memory.
constexpr int64_t kPassTokens = 4096;

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
  if (!memory.root) memory.root = memory.tree->root(0);
  if (!memory.weights) memory.weights = std::make_shared<ReadyWeights>();
  return memory;
}

}  // namespace

struct Sampling::Prompt {
  int64_t row, place;
  std::vector<int32_t> tokens;
  SampleOptions options;
  int64_t most;       // tokens of a completion
  int64_t begun = 0;  // samples
  int64_t kept_tokens = 0;
  Prefix prefix{};  // once it has room
};

struct Sampling::Sequence {
  Completion completion;
  std::shared_ptr<Prompt> prompt;
  Rng rng;

  bool is_done() const {
    return completion.stopped || static_cast<int64_t>(completion.tokens.size()) == prompt->most;
  }
};

Sampling::Sampling(const Decoder& decoder, const SampleOptions& sizes, SamplingMemory memory)
    : decoder_(decoder),
      batch_size_(sizes.batch_size),
      token_budget_(sizes.token_budget),
      memory_(whole(std::move(memory), decoder)),
      batch_(decoder, memory_.tree.get()) {
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
                   "--stop-id: expected ids below the vocabulary size {}, received {}", decoder.vocab_size(),
                   id);
  }
  TokenChooser{options.choice};  // throws if an option is out of range
}

void Sampling::add(int64_t row, std::span<const int32_t> prompt, const SampleOptions& options,
                   int64_t place) {
  const auto size = static_cast<int64_t>(prompt.size()), limit = decoder_.config().max_position_embeddings;
  int64_t most = options.max_new_tokens;
  if (limit > 0) most = std::min(most, limit - size);
  waiting_.push_back(
      std::make_shared<Prompt>(Prompt{row, place, {prompt.begin(), prompt.end()}, options, most}));
}

std::vector<Completion> Sampling::step(const TokenWatch& watch) {
  const accumulating::PreparedWeights prepared(std::move(*memory_.weights));
  try {
    check_interrupt();
    admit();
    if (!encoding_.empty()) {
      timed(decoder_.device(), &counts_.prompt_seconds, [&] { encode_some(); });
    }
    timed(decoder_.device(), &counts_.decode_seconds, [&] {
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
    next.prefix = memory_.tree->add(memory_.root, next.tokens, std::min(kPassTokens, token_budget_));
    hold(next);
    if (tokens > token_budget_ && !is_first) {
      next.prefix.reset();
      return;
    }
    next.kept_tokens = next.prefix->end();
    for (const Prefix& node : memory_.tree->unencoded(next.prefix)) next.kept_tokens -= node->size();
    counts_.kept_prompt_tokens += next.kept_tokens;
    encoding_.push_back(std::move(waiting_.front()));
  }
}

void Sampling::encode_some() {
  const int64_t most = std::min(kPassTokens, token_budget_);
  std::vector<Prefix> nodes;
  std::unordered_set<const PrefixNode*> taken;
  int64_t tokens = 0;
  const auto take = [&](const Prefix& node) {
    if (taken.contains(node.get())) return true;
    if (tokens > 0 && tokens + node->size() > most) return false;
    taken.insert(node.get());
    nodes.push_back(node);
    tokens += node->size();
    return true;
  };
  for (const auto& prompt : encoding_) {
    if (!std::ranges::all_of(memory_.tree->unencoded(prompt->prefix), take)) break;
  }
  std::ranges::sort(nodes, [](const Prefix& a, const Prefix& b) { return is_before(*a, *b); });
  if (!nodes.empty()) encode(decoder_, nodes, memory_.tree.get());
  counts_.encoded_prompt_tokens += tokens;
  memory_.tree->trim();
  for (; !encoding_.empty() && encoding_.front()->prefix->hidden.defined(); encoding_.pop_front()) {
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
    counts_.flat_prompt_tokens += prompt->prefix->end();
    hidden.push_back(prompt->prefix->hidden);
    sequences.push_back({{.row = prompt->row, .sample = sample, .kept_tokens = prompt->kept_tokens},
                         prompt,
                         Rng(prompt->options.seed,
                             (static_cast<uint64_t>(prompt->place) << 32) | static_cast<uint64_t>(sample))});
  }
  if (sequences.empty()) return;
  choose(logits_of(at::cat(hidden)), watch, &sequences);
  for (Sequence& sequence : sequences) {
    if (sequence.is_done()) {
      done_.push_back(std::move(sequence.completion));
    } else {
      const int64_t place = batch_.add(sequence.prompt->prefix);
      live_.insert(live_.begin() + place, std::move(sequence));
    }
  }
}

void Sampling::decode(const TokenWatch& watch) {
  std::vector<int32_t> tokens;
  for (const Sequence& sequence : live_) tokens.push_back(sequence.completion.tokens.back());
  choose(logits_of(batch_.step(tokens)), watch, &live_);
  ++counts_.decode_steps;
  std::vector<bool> keep;
  std::vector<Sequence> rest;
  for (Sequence& sequence : live_) {
    keep.push_back(!sequence.is_done());
    if (keep.back()) {
      rest.push_back(std::move(sequence));
      continue;
    }
    const std::span<const int32_t> given = sequence.completion.tokens;
    if (memory_.tree->keeps())
      batch_.store(static_cast<int64_t>(keep.size()) - 1, given.first(given.size() - 1));
    done_.push_back(std::move(sequence.completion));
  }
  live_ = std::move(rest);
  batch_.keep(keep);
}

/// Logits [B, V] on the host, in the accumulator dtype.
at::Tensor Sampling::logits_of(const at::Tensor& hidden) const {
  const at::NoGradGuard no_grad;
  const at::Tensor logits = accumulating::head_logits(decoder_.final_norm(hidden), decoder_.lm_head_weight());
  return decoder_.capped(logits).cpu();
}

/// Chooses a token for each sequence from its row of logits, rows in parallel.
void Sampling::choose(const at::Tensor& logits, const TokenWatch& watch, std::vector<Sequence>* sequences) {
  const auto choose_as = [&]<class Scalar>(Scalar) {
    const at::Tensor rows = logits.contiguous();
    const auto width = static_cast<size_t>(rows.size(1));
    at::parallel_for(0, rows.size(0), 1, [&](int64_t begin, int64_t end) {
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
        sequence.completion.stopped = std::ranges::find(own.stop_ids, chosen.token) != own.stop_ids.end();
      }
    });
  };
  if (logits.scalar_type() == at::kDouble) {
    choose_as(double());
  } else {
    choose_as(float());
  }
  counts_.sampled_tokens += static_cast<int64_t>(sequences->size());
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
  batch_.keep(std::vector<bool>(batch_.num_live(), false));
  memory_.tree->trim();
}

}  // namespace espalier
