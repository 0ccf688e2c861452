// SPDX-License-Identifier: Apache-2.0
// espalier synth: random trajectories with a given amount of sharing.
#include "espalier/tree/synth.h"

#include <cmath>
#include <memory>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "espalier/commands/command.h"
#include "espalier/data/writer.h"
#include "espalier/engine/step.h"
#include "espalier/runtime/progress.h"
#include "espalier/tree/forest.h"

namespace espalier::commands {
namespace {

struct SynthArguments {
  SynthOptions synth;
  std::string out;
  double loss_rate = 1, target_por = -1;
  bool rl = false;
};

// Puts loss on random tokens; with `rl` also adds rewards, groups (one per tree) and behaviour log-probs near
// those of a uniform model.
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

nlohmann::ordered_json run_synth(const SynthArguments& flags) {
  SynthOptions options = flags.synth;
  if (flags.target_por >= 0) options.target_cached_token_ratio = 1 / (1 - flags.target_por);
  const Trajectories trajectories = to_trajectories(synthesize(options), flags);
  const ForestStatistics statistics = forest_statistics(forest_of(trajectories, {}));
  write_trajectories(flags.out, trajectories);
  return {{"out", flags.out},
          {"trajectories", statistics.num_trajectories},
          {"flat_tokens", statistics.flat_tokens},
          {"tree_tokens", statistics.tree_tokens},
          {"cached_token_ratio", statistics.cached_token_ratio},
          {"por", statistics.por}};
}

}  // namespace

Command synth_command(const Caller&) {
  const auto flags = std::make_shared<SynthArguments>();
  Command command{.run = [flags](const OptionList&) { return Result{run_synth(*flags)}; }};
  SynthOptions& synth = flags->synth;
  OptionList& list = command.options;
  list.group("Random trees");
  list.add("out", &flags->out, "File to write: .jsonl (also .gz, .zst) or .safetensors",
           {.letter = 'o', .path = PathKind::kFile, .required = true});
  list.add("trees", &synth.num_trees, "Number of trees", {.least = 1});
  list.add("depth", &synth.depth, "Nodes from root to leaf", {.least = 1});
  list.add("branching", &synth.branching, "Children of every inner node", {.least = 1});
  list.add("node-length", &synth.node_length, "Mean tokens of a node; lengths vary by 50 %", {.least = 1});
  list.add("fixed-node-length", &synth.fixed_node_length, "All nodes have exactly the node length");
  list.add("vocab-size", &synth.vocab_size, "Token ids are below this", {.least = 1});
  list.add("end-inside", &synth.end_inside, "Probability that a trajectory also ends at an inner node",
           {.least = 0, .most = 1});
  list.add("duplicate", &synth.duplicate, "Probability that a trajectory is repeated",
           {.least = 0, .most = 1});
  list.add("target-por", &flags->target_por, "Target potential overlap ratio (1 - tree / flat tokens)",
           {.least = 0, .most = 0.9999, .shows_default = false});
  list.add("target-cached-token-ratio", &synth.target_cached_token_ratio,
           "Target ratio of flat to tree tokens (>= 1)",
           {.least = 1, .most = 1e6, .shows_default = false, .excludes = "target-por"});
  list.add("loss-rate", &flags->loss_rate, "Fraction of the tokens that carry loss", {.least = 0, .most = 1});
  list.add("rl", &flags->rl, "Add reward, group_id (one group per tree) and logprobs, for grpo");
  list.add("seed", &synth.seed, "Random seed; equal seeds give equal files");
  return command;
}

}  // namespace espalier::commands
