// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/sampling_options.h"

#include <algorithm>
#include <iterator>

namespace espalier {

void SamplingOptions::add_sampling(OptionList* list) {
  list->group("Sampling");
  list->add("samples", &options.samples, "Completions per prompt, which form a group", {.least = 1});
  list->add("max-new-tokens", &options.max_new_tokens, "Maximum tokens of a completion", {.least = 1});
  list->add("temperature", &options.choice.temperature,
            "Divide logits by this. 0: always take the most likely token", {.least = 0});
  list->add("top-k", &options.choice.top_k, "Choose among the K most likely tokens (0: all)", {.least = 0});
  list->add("top-p", &options.choice.top_p,
            "Choose among the smallest set of most likely tokens (after --top-k) whose probabilities "
            "sum up to P",
            {.least = 0, .most = 1});
  list->add("stop-id", &options.stop_ids,
            "Token ids that end a completion, which keeps them. Without it: eos_token_id of "
            "generation_config.json, or else of config.json",
            {.least = 0});
  list->add("ignore-stop-ids", &ignore_stop_ids,
            "Do not stop at stop ids: always sample --max-new-tokens tokens");
  list->add("whole-rows", &whole_rows,
            "Continue whole rows instead of prompts, and keep their loss and log-probabilities: for "
            "conversations with sampled turns, after a tool's result");
  list->add("seed", &options.seed,
            "Random seed. Each completion has its own random stream, by the number of its prompt's row "
            "and its number among the completions");
}

void SamplingOptions::add_sizes(OptionList* list) {
  list->group(kMachineGroup);
  list->add("batch-size", &options.batch_size,
            "Maximum number of completions sampled together: more are faster per token and use more memory "
            "for keys and values",
            {.least = 1});
  list->add("token-budget", &options.token_budget,
            "Maximum number of prompt tokens, shared ones counted once, whose keys and values are kept at a "
            "time. A single prompt may have more",
            {.least = 1});
}

SampleOptions SamplingOptions::resolved(const std::vector<int32_t>& model_stop_ids,
                                        int64_t vocab_size) const {
  SampleOptions all = options;
  if (ignore_stop_ids) {
    all.stop_ids.clear();
  } else if (all.stop_ids.empty()) {
    std::ranges::copy_if(model_stop_ids, std::back_inserter(all.stop_ids),
                         [&](int32_t id) { return id < vocab_size; });
  }
  return all;
}

}  // namespace espalier
