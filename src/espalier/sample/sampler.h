// SPDX-License-Identifier: Apache-2.0
// Completions of prompts, sampled with a decoder's weights.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/model/decoder.h"
#include "espalier/sample/token_choice.h"

namespace espalier {

struct SampleOptions {
  int64_t samples = 1;           // of each prompt
  int64_t max_new_tokens = 256;  // of each completion, its stop token included
  TokenChoiceOptions choice{};
  std::vector<int32_t> stop_ids{};  // a completion ends with the first of these; none: with its last token
  uint64_t seed = 0;
  int64_t batch_size = 64;       // sequences that are decoded together, at most
  int64_t token_budget = 32768;  // prompt tokens whose keys and values are kept at a time; one prompt may
                                 // have more
};

/// What was sampled after a prompt.
struct Completion {
  int64_t row = 0;     // of the prompts
  int64_t sample = 0;  // of the row's samples, from 0
  std::vector<int32_t> tokens{};
  std::vector<double> logprobs{};  // [tokens] TokenChoice::logprob
  bool stopped = false;            // its last token is one of stop_ids
};

/// How far a run is.
struct SampleProgress {
  int64_t sampled_tokens = 0;
  int64_t finished = 0, completions = 0;  // of which so many are done
  double fraction = 0;                    // at least; completions may end before max_new_tokens
};

struct SampleResult {
  std::vector<Completion> completions;  // by row, then by sample
  int64_t flat_prompt_tokens = 0;       // of all completions
  int64_t encoded_prompt_tokens = 0;
  int64_t sampled_tokens = 0;
  int64_t decode_steps = 0;
  double prompt_seconds = 0, decode_seconds = 0;
};

/// Samples completions of every row of `prompts` (prompts.h). Prompts are encoded as trees, groups of them at
/// a time; then every live sequence takes one token in each step, and where one ends the next begins. The
/// random numbers of a sample depend on seed, row and sample alone; what they are drawn from depends on the
/// rest of the batch by rounding only, and equal calls give equal bits. A completion also ends where its
/// trajectory has max_position_embeddings tokens. Throws InputError where a prompt has no room for a token,
/// an id is outside the vocabulary, or an option is not as said.
SampleResult sample(const Decoder& decoder, const Trajectories& prompts, const SampleOptions& options,
                    const std::function<void(const SampleProgress&)>& progress = {});

/// One row for each completion, with those of a prompt in one group: prompt and completion as input_ids, loss
/// on the completion, its log-probabilities. Names follow those of the prompts' rows: NAME/sample-K, in the
/// group of the row or, where it has none, NAME. In prompts of whole rows (prompts_of), the loss and the
/// log-probabilities of the row stay.
Trajectories rows_of(const std::vector<Completion>& completions, const Trajectories& rows,
                     const Trajectories& prompts);

}  // namespace espalier
