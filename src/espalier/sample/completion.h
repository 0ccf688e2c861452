// SPDX-License-Identifier: Apache-2.0
// What sampling is asked for, and what it gives. Does not use LibTorch.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <vector>

#include "espalier/sample/token_choice.h"

namespace espalier {

struct SampleOptions {
  int64_t samples = 1;           // per prompt
  int64_t max_new_tokens = 256;  // per completion, including its stop token
  TokenChoiceOptions choice{};
  std::vector<int32_t> stop_ids{};  // a completion ends at the first of these; none: at max_new_tokens
  uint64_t seed = 0;
  bool prompt_logprobs = false;  // also of the prompt's tokens, at temperature 1
  int64_t batch_size = 64;       // maximum number of live sequences
  int64_t token_budget = 32768;  // prompt tokens whose keys and values are held at a time; a single
                                 // prompt may exceed it
  int64_t pass_tokens = 4096;    // of prompts that are encoded at a time
  /// By row of the prompts, in place of all but the three sizes above; empty: the same for all rows. Random
  /// numbers of a row are then those of row 0 of a call with its options.
  std::vector<SampleOptions> rows{};
};

/// Tokens sampled after a prompt.
struct Completion {
  int64_t row = 0;     // of the prompts
  int64_t sample = 0;  // number among the row's samples, from 0
  std::vector<int32_t> tokens{};
  std::vector<double> logprobs{};  // [tokens] TokenChoice::logprob
  bool stopped = false;            // whether its last token is one of stop_ids, or a TokenWatch ended it
  int64_t kept_tokens = 0;         // of its prompt, which were encoded before it came
  std::vector<double> prompt_logprobs{};  // of its prompt's tokens, 0 for the first one; empty: not asked for
  std::exception_ptr error{};             // why it, with all others of its prompt, could not be sampled
};

/// Told of completions that have a new token, after each step. Returns which of them end with it, or none.
using TokenWatch = std::function<std::vector<bool>(std::span<const Completion* const>)>;

struct SamplingCounts {
  int64_t flat_prompt_tokens = 0;  // of all completions
  int64_t kept_prompt_tokens = 0;  // of all prompts, Completion::kept_tokens
  int64_t encoded_prompt_tokens = 0;
  int64_t sampled_tokens = 0;
  int64_t decode_steps = 0;
  double truncation = 0;  // sum of TokenChoice::truncation of the sampled tokens
  double prompt_seconds = 0, decode_seconds = 0;
};

}  // namespace espalier
