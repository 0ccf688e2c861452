// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/sample_flags.h"

#include <algorithm>
#include <iterator>

#include "espalier/cli/flags/arguments.h"
#include "espalier/cli/print/help.h"

namespace espalier::cli {

void SampleFlags::add_sampling(CLI::App* command) {
  const HelpGroup group(command, "Sampling");
  command->add_option("--samples", options.samples, "Completions of each prompt: a group")
      ->check(whole_from(1))
      ->capture_default_str();
  command->add_option("--max-new-tokens", options.max_new_tokens, "Most tokens of a completion")
      ->check(whole_from(1))
      ->capture_default_str();
  command
      ->add_option("--temperature", options.choice.temperature,
                   "Divide logits by this. 0: always take the most likely token")
      ->check(real_from(0))
      ->capture_default_str();
  command->add_option("--top-k", options.choice.top_k, "Choose among the K most likely tokens (0: all)")
      ->check(whole_from(0))
      ->capture_default_str();
  command
      ->add_option("--top-p", options.choice.top_p,
                   "Choose among the fewest most likely tokens (of those that --top-k leaves) whose "
                   "probabilities sum up to P")
      ->check(real_from(0, 1))
      ->capture_default_str();
  command
      ->add_option("--stop-id", options.stop_ids,
                   "Token ids that end a completion, which keeps them. Without it: eos_token_id of "
                   "generation_config.json, or else of config.json")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(whole_from(0));
  command->add_flag("--ignore-stop-ids", ignore_stop_ids, "Sample --max-new-tokens tokens whatever they are");
  command->add_flag("--whole-rows", whole_rows,
                    "Go on from whole rows, and keep the loss and the log-probabilities that they have: "
                    "from conversations with sampled turns, after a tool's result");
  command
      ->add_option("--seed", options.seed,
                   "Of the random numbers. Each completion has its own, by the number of its prompt's row "
                   "and its own number")
      ->check(whole_from(0))
      ->capture_default_str();
}

void SampleFlags::add_sizes(CLI::App* command) {
  const HelpGroup group(command, kMachineGroup);
  command
      ->add_option("--batch-size", options.batch_size,
                   "Most completions that are sampled together: more are faster per token and keep more "
                   "keys and values")
      ->check(whole_from(1))
      ->capture_default_str();
  command
      ->add_option(
          "--token-budget", options.token_budget,
          "Most prompt tokens, shared ones counted once, whose keys and values are kept at a time. A "
          "single prompt may have more")
      ->check(whole_from(1))
      ->capture_default_str();
}

SampleOptions SampleFlags::resolved(const std::vector<int32_t>& of_model, int64_t vocab_size) const {
  SampleOptions all = options;
  if (ignore_stop_ids) {
    all.stop_ids.clear();
  } else if (all.stop_ids.empty()) {
    std::ranges::copy_if(of_model, std::back_inserter(all.stop_ids),
                         [&](int32_t id) { return id < vocab_size; });
  }
  return all;
}

}  // namespace espalier::cli
