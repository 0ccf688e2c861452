// SPDX-License-Identifier: Apache-2.0
// Completions of prompts, sampled with a decoder's weights.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "espalier/base/options.h"
#include "espalier/data/trajectories.h"
#include "espalier/distributed/group.h"
#include "espalier/model/decoder.h"
#include "espalier/sample/sampling.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// Size of the row's prompt: the tokens before the first one with loss. The whole row if no token carries
/// loss or the first one does, as in rows without a mask.
int64_t prompt_size(const Trajectories& trajectories, int64_t row);

/// The prompts, one row per row of the data. `whole_rows`: all tokens of the rows, for completions that
/// continue tokens with loss; throws InputError if a row lacks log-probabilities of those.
Trajectories prompts_of(const Trajectories& trajectories, bool whole_rows = false);

/// The trajectories of a forest in preorder, so that those with a shared prefix are adjacent. Trajectories
/// that end at the same node keep their order. Of several ranks each has an equal part of the order.
std::vector<int64_t> prompt_order(const Forest& forest, const Group& group = alone());

struct SampleResult : SamplingCounts {    // with those of SamplingMemory; steps and seconds: of this rank
  std::vector<Completion> completions{};  // ordered by row, then by sample
};

/// Told of a call of sample() that goes on.
struct SampleEvents {
  std::function<void(int64_t finished, int64_t completions)> progress{};
  TokenWatch watch{};
};

/// Samples completions of every row of `prompts` (Sampling). The random numbers of a sample depend only on
/// seed, row and sample number. The distributions depend on the rest of the batch and on `memory` by rounding
/// only, and equal calls without memory are bitwise identical. A completion also ends when its trajectory has
/// max_position_embeddings tokens. `weights`: the decoder's, with an adapter or without. Throws InputError if
/// a prompt already has that many, an id is outside the vocabulary, or an option is out of range. Several
/// ranks, with the same prompts and options, divide the prompts, and all get all completions.
SampleResult sample(const Decoder& decoder, const Trajectories& prompts, const SampleOptions& options,
                    const SampleEvents& events = {}, const SamplingMemory& memory = {},
                    const Group& group = alone(), const SampledWeights& weights = {});

/// Throws InputError naming a row whose tokens with loss, which its completions keep, have log-probabilities
/// of another temperature than that of the options.
void check_temperatures(const Trajectories& rows, const Trajectories& prompts, const SampleOptions& options);

/// One row per completion: prompt and completion as input_ids, loss on the completion, its log-probabilities,
/// and the temperature, top_k and top_p of `options` where they change the distribution.
/// Rows are named NAME/sample-K after the prompt's row, and grouped by the group of that row, or by NAME if
/// it has none. For prompts of whole rows (prompts_of), the row's loss and log-probabilities are kept.
Trajectories rows_of(const std::vector<Completion>& completions, const Trajectories& rows,
                     const Trajectories& prompts, const SampleOptions& options = {});

struct SamplingFlags {
  SampleOptions options;  // stop_ids: as given by --stop-id
  bool ignore_stop_ids = false;
  bool whole_rows = false;

  /// --samples, --temperature and so on.
  void add_sampling(OptionList* list);
  /// --batch-size and --token-budget.
  void add_sizes(OptionList* list);

  /// The options with stop ids resolved: the given ones, otherwise those of the model without ids outside the
  /// vocabulary, which can never be sampled.
  SampleOptions resolved(const std::function<std::vector<int32_t>()>& model_stop_ids,
                         int64_t vocab_size) const;
};

}  // namespace espalier
