// SPDX-License-Identifier: Apache-2.0
// What a Sampling works on: prompts, their sequences, and the clients that wait for them.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "espalier/base/rng.h"
#include "espalier/sample/sampling.h"

namespace espalier {

struct Sampling::Prompt {
  int64_t row, place, client;
  SampledWeights weights;
  std::vector<int32_t> tokens;
  SampleOptions options;
  int64_t most;       // tokens of a completion
  int64_t begun = 0;  // samples
  int64_t kept_tokens = 0;
  bool is_alone = false;  // a pass with it has failed: it is encoded by itself
  Prefix prefix{};        // once it has room
  /// A sequence that was paused; the tokens of the prompt then end with those of its completion but the last,
  /// of which there are so many.
  std::shared_ptr<Sequence> paused{};
  int64_t folded = 0;
  int64_t returns = 0;  // of its room

  std::vector<Prefix> unencoded(PrefixTree& tree) const {
    return tree.unencoded(prefix, options.prompt_logprobs && folded == 0);
  }
  /// Sorts prompts by weights, then in preorder.
  auto key() const { return std::tie(weights.number, tokens); }
};

struct Sampling::Sequence {
  Completion completion;
  std::shared_ptr<Prompt> prompt;
  Rng rng;
  int64_t slot = -1;                      // index into the tails
  std::shared_ptr<const Encoded> last{};  // its last step, null before the first one
  int64_t state = -1;                     // row of it
  int64_t stepped = 0;                    // number of the last step
  int64_t pauses = 0;

  /// What was sampled and is not in the prefix, but for the last token, which is the next input.
  std::span<const int32_t> tail() const {
    return std::span(completion.tokens).first(completion.tokens.size() - 1).subspan(prompt->folded);
  }
  bool is_done() const {
    return completion.stopped || static_cast<int64_t>(completion.tokens.size()) == prompt->most;
  }
};

/// Prompts of a client in their order: those that wait for room, are encoded, begin samples.
struct Sampling::Client {
  std::deque<std::shared_ptr<Prompt>> waiting{}, encoding{}, ready{};

  bool is_empty() const { return waiting.empty() && encoding.empty() && ready.empty(); }
};

/// The error of work of which others do not fail: of LibTorch, of memory, of inputs; null: none.
template <class Body>
std::exception_ptr error_of(const Body& body) {
  try {
    body();
  } catch (const c10::Error&) {
    return std::current_exception();
  } catch (const std::bad_alloc&) {
    return std::current_exception();
  } catch (const std::runtime_error&) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace espalier
