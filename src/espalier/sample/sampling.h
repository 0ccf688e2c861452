// SPDX-License-Identifier: Apache-2.0
// Completions of prompts that come while others are sampled.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
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
///
/// Several clients share it: each has as many places and as much time as the others, however much one of them
/// asks for. Prompts of one client are in order.
///
/// A prompt that cannot be sampled (its logits are not finite, memory does not suffice for it) ends with
/// Completion::error; others go on. Where memory does not suffice for all, fewer are sampled at a time.
class Sampling {
 public:
  /// `decoder` outlives this object. `sizes`: options whose three sizes count.
  Sampling(const Decoder& decoder, const SampleOptions& sizes, SamplingMemory memory = {});
  ~Sampling();

  /// Throws InputError where a prompt of a row or its options cannot be used.
  static void check(const Decoder& decoder, int64_t row, int64_t prompt_size, const SampleOptions& options);

  /// Prompts that are added from now on are sampled with these. At first: the decoder's.
  void use(SampledWeights weights) { weights_ = std::move(weights); }
  /// Whether prompts that are not done have weights of this number.
  bool uses(int64_t number) const;

  /// A prompt that passes `check`, with a row of its own. Its random numbers are those of row `place` of a
  /// call with its options.
  void add(int64_t row, std::span<const int32_t> prompt, const SampleOptions& options, int64_t place,
           int64_t client = 0);

  /// Ends a prompt: its completions that are not done never are. Returns how many there were.
  int64_t remove(int64_t row, int64_t client = 0);

  bool is_idle() const;

  /// Encodes prompts, as many as are a pass, and samples a token of each live sequence. Returns what is done.
  /// After an exception, which is one of `watch`, an interrupt or a bug, it is idle.
  std::vector<Completion> step(const TokenWatch& watch = {});

  const SamplingCounts& counts() const { return *memory_.counts; }

 private:
  struct Prompt;
  struct Sequence;
  struct Client;
  struct Pass;

  // sampling_turns.cpp
  std::vector<std::pair<int64_t, Client*>> in_turn(int64_t* last);
  std::map<int64_t, int64_t> live_by_client() const;
  int64_t share() const;
  void admit();
  bool encodes_now();
  void take(const Client& client, int64_t room, Pass* pass);
  void encode_some();
  std::vector<Sequence> next_sequences();
  std::vector<Sequence> take_resting();
  bool take_room_back(const std::exception_ptr& error);
  void pause(std::vector<Sequence> sequences, const std::exception_ptr& error);
  void have_more_places();
  void fail(const Prompt& prompt, const std::exception_ptr& error);
  std::vector<int64_t> end(int64_t row, int64_t client);
  void fail_broken(const std::vector<Sequence>& sequences);
  void forget_idle_clients();

  void begin(const TokenWatch& watch);
  void go_live(Sequence sequence);
  void decode(const TokenWatch& watch);
  at::Tensor forward();
  void grow_tails();
  std::vector<LayerContext> states() const;
  void keep(const Sequence& sequence);
  at::Tensor logits_of(const at::Tensor& hidden,
                       const std::vector<accumulating::AdapterMapsPtr>& adapters) const;
  void choose(const at::Tensor& logits, std::span<const int64_t> row, const TokenWatch& watch,
              std::vector<Sequence>* sequences);
  void clear();

  const Decoder& decoder_;
  int64_t batch_size_, token_budget_, pass_tokens_;
  int64_t places_;          // at most batch_size_: as many sequences as memory has room for
  int64_t calm_steps_ = 0;  // without a failure
  int64_t steps_ = 0;
  int64_t first_encoded_ = -1, first_begun_ = -1;     // clients whose turn was the first one
  double encoded_seconds_ = 0, decoded_seconds_ = 0;  // while clients wait for each other
  SamplingMemory memory_;
  SampledWeights weights_;
  std::map<int64_t, Client> clients_;  // that have prompts
  std::vector<Sequence> live_;         // in preorder of their prompts, by weights
  /// What live sequences sampled, and gave to steps.
  struct Tails {
    std::vector<LayerContext> keys{};  // by layer: k and v [slots, capacity, K, D]
    int64_t slots = 0, used_slots = 0, capacity = 0;
    std::vector<int64_t> free_slots{};  // of those used before
  } tails_;
  std::vector<Completion> done_;
};

}  // namespace espalier
