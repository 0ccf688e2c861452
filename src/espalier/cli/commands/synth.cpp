// SPDX-License-Identifier: Apache-2.0
// espalier synth: random trajectories that share as much as asked.
#include "espalier/tree/synth.h"
#include "espalier/base/units.h"

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/base/output.h"
#include "espalier/base/rng.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/arguments.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/cli/print/help.h"
#include "espalier/data/writer.h"
#include "espalier/engine/batch.h"
#include "espalier/runtime/progress.h"
#include "espalier/tree/statistics.h"

namespace espalier::cli {
namespace {

struct SynthArguments {
  SynthOptions synth;
  std::string out;
  double loss_rate = 1;
  bool rl = false;
};

// Loss on a random part of the tokens; with `rl` also rewards, groups (one per tree) and behaviour log-probs
// near those of a uniform model.
Trajectories to_trajectories(const Csr<int32_t>& sequences, const SynthArguments& flags) {
  Trajectories trajectories;
  const int64_t rows = sequences.num_rows();
  trajectories.offsets = Column<int64_t>(sequences.offsets);
  trajectories.input_ids = Column<int32_t>(sequences.values);
  Rng rng(flags.synth.seed, 0x10ad);
  std::vector<uint8_t> mask(sequences.values.size());
  for (uint8_t& entry : mask) entry = rng.uniform() < flags.loss_rate;
  trajectories.loss_weights = Column<uint8_t>(std::move(mask));
  for (int64_t r = 0; r < rows; ++r) trajectories.trajectory_id.push_back(fmt::format("synth-{}", r));
  if (!flags.rl) return trajectories;
  const Forest forest = forest_of(trajectories, {});
  std::vector<double> logprobs(sequences.values.size()), reward(rows);
  for (double& logprob : logprobs) {
    logprob = -std::log(static_cast<double>(flags.synth.vocab_size)) - 0.2 * rng.uniform();
  }
  for (int64_t r = 0; r < rows; ++r) {
    logprobs[sequences.offsets[r]] = 0;
    reward[r] = rng.below(2) == 0 ? 0.0 : 1.0;
    trajectories.group_id.push_back(fmt::format("tree-{}", root_path(forest, forest.end_node[r]).front()));
  }
  trajectories.logprobs.values = Column<double>(std::move(logprobs));
  trajectories.reward.values = Column<double>(std::move(reward));
  return trajectories;
}

void run_synth(const SynthArguments& flags) {
  const Trajectories trajectories = to_trajectories(synthesize(flags.synth), flags);
  const ForestStatistics statistics = forest_statistics(forest_of(trajectories, {}));
  write_trajectories(flags.out, trajectories);
  print_output("{}: {}, {}, {}, cached-token ratio {:.3f}, POR {:.3f}\n", printable(flags.out),
               count_of(statistics.num_trajectories, "trajectory", "trajectories"),
               count_of(statistics.flat_tokens, "flat token", "flat tokens"),
               count_of(statistics.tree_tokens, "tree token", "tree tokens"), statistics.cached_token_ratio,
               statistics.por);
}

}  // namespace

void add_synth(CLI::App& app, int*) {
  CLI::App* command =
      app.add_subcommand("synth", "Write random trajectories that share prefixes as the flags say");
  auto flags = std::make_shared<SynthArguments>();
  SynthOptions& synth = flags->synth;
  const HelpGroup group(command, "Random trees");
  command->add_option("-o,--out", flags->out, "File to write: .jsonl (also .gz, .zst) or .safetensors")
      ->type_name("FILE")
      ->required();
  command->add_option("--trees", synth.num_trees, "Number of trees")
      ->check(whole_from(1))
      ->capture_default_str();
  command->add_option("--depth", synth.depth, "Nodes from root to leaf")
      ->check(whole_from(1))
      ->capture_default_str();
  command->add_option("--branching", synth.branching, "Children of every inner node")
      ->check(whole_from(1))
      ->capture_default_str();
  command
      ->add_option("--node-length", synth.node_length, "Mean tokens of a node; lengths vary by half of that")
      ->check(whole_from(1))
      ->capture_default_str();
  command->add_flag("--fixed-node-length", synth.fixed_node_length, "All nodes have exactly the node length");
  command->add_option("--vocab-size", synth.vocab_size, "Token ids are below this")
      ->check(whole_from(1))
      ->capture_default_str();
  command
      ->add_option("--end-inside", synth.end_inside,
                   "Probability that a trajectory also ends at an inner node")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--duplicate", synth.duplicate, "Probability that a trajectory is repeated")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  auto* por =
      command
          ->add_option("--target-por", synth.target_por, "Potential overlap ratio (1 - tree/flat) to reach")
          ->check(CLI::Range(0.0, 0.9999));
  command
      ->add_option("--target-cached-token-ratio", synth.target_cached_token_ratio,
                   "Flat over tree tokens to reach (>= 1)")
      ->check(CLI::Range(1.0, 1e6))
      ->excludes(por);
  command->add_option("--loss-rate", flags->loss_rate, "Part of the tokens that carry loss")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_flag("--rl", flags->rl, "Add reward, group_id (one group per tree) and logprobs, for grpo");
  command->add_option("--seed", synth.seed, "Equal seeds give equal files")->capture_default_str();
  add_config(command);
  command->callback([flags] { run_synth(*flags); });
}

}  // namespace espalier::cli
