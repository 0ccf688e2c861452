// SPDX-License-Identifier: Apache-2.0
// Completions of prompts that come while others are sampled.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "espalier/model/decoder.h"
#include "espalier/model/gradient_accumulation.h"
#include "espalier/sample/completion.h"
#include "espalier/sample/continuation.h"
#include "espalier/sample/prefix_tree.h"

namespace espalier {

/// Weights that are made ready for products.
using ReadyWeights = std::remove_pointer_t<decltype(accumulating::PreparedWeights::find())>;

/// What prompts are sampled with: the decoder's weights and an adapter of theirs.
struct SampledWeights {
  int64_t number = 0;  // no other weights whose prefixes the tree has have it
  accumulating::AdapterMapsPtr adapter{};
};

/// What one Sampling leaves to the next. Without it each begins with nothing.
struct SamplingMemory {
  std::shared_ptr<PrefixTree> tree{};
  std::shared_ptr<ReadyWeights> weights{};
  std::shared_ptr<SamplingCounts> counts{};  // to which the next one adds
};

/// Prompts whose completions are sampled side by side. Each step appends one token to every live sequence;
/// prompts come and sequences end between steps (continuous batching). Prefixes that prompts share are
/// encoded once. Prompts of different adapters share the products with the weights. Completions depend on
/// what is sampled beside them by rounding only.
class Sampling {
 public:
  /// `decoder` outlives this object. `sizes`: options whose two sizes count.
  Sampling(const Decoder& decoder, const SampleOptions& sizes, SamplingMemory memory = {});
  ~Sampling();

  /// Throws InputError where a prompt of a row or its options cannot be used.
  static void check(const Decoder& decoder, int64_t row, int64_t prompt_size, const SampleOptions& options);

  /// Prompts that are added from now on are sampled with these. At first: the decoder's.
  void use(SampledWeights weights) { weights_ = std::move(weights); }
  /// Whether prompts that are not done have weights of this number.
  bool uses(int64_t number) const;

  /// A prompt that passes `check`. Its random numbers are those of row `place` of a call with its options.
  void add(int64_t row, std::span<const int32_t> prompt, const SampleOptions& options, int64_t place);

  bool is_idle() const { return waiting_.empty() && encoding_.empty() && ready_.empty() && live_.empty(); }

  /// Encodes prompts, as many as are a pass, and samples a token of each live sequence. Returns what is done.
  /// After an exception it is idle.
  std::vector<Completion> step(const TokenWatch& watch = {});

  const SamplingCounts& counts() const { return *memory_.counts; }

 private:
  struct Prompt;
  struct Sequence;

  void admit();
  void encode_some();
  void begin(const TokenWatch& watch);
  void decode(const TokenWatch& watch);
  void grow_tails();
  std::vector<LayerContext> states() const;
  void keep(const Sequence& sequence, int64_t row);
  at::Tensor logits_of(const at::Tensor& hidden, const std::vector<Sequence>& sequences) const;
  void choose(const at::Tensor& logits, const TokenWatch& watch, std::vector<Sequence>* sequences);
  void clear();

  const Decoder& decoder_;
  int64_t batch_size_, token_budget_;
  SamplingMemory memory_;
  SampledWeights weights_;
  // Prompts in turn: those that wait for room, are encoded, begin samples.
  std::deque<std::shared_ptr<Prompt>> waiting_, encoding_, ready_;
  std::vector<Sequence> live_;  // in preorder of their prompts, by weights
  /// What live sequences sampled, and gave to steps.
  struct Tails {
    std::vector<LayerContext> keys{};  // by layer: k and v [slots, capacity, K, D]
    int64_t slots = 0, used_slots = 0, capacity = 0;
    std::vector<int64_t> free_slots{};  // of those used before
    Encoded last{};                     // of the last step
  } tails_;
  std::vector<Completion> done_;
};

}  // namespace espalier
