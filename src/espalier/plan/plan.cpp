// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/plan.h"

#include <algorithm>
#include <array>

#include "espalier/base/interrupt.h"
#include "espalier/base/options.h"

namespace espalier {

namespace {

constexpr auto kStrategies =
    std::to_array<Word<Strategy>>({{"auto", Strategy::kAuto},
                                   {"partition", Strategy::kPartition},
                                   {"tree-packing", Strategy::kTreePacking},
                                   {"append-only", Strategy::kAppendOnly},
                                   {"sequence-packing", Strategy::kSequencePacking}});

constexpr auto kCheckpoints =
    std::to_array<Word<CheckpointActivations>>({{"auto", CheckpointActivations::kAuto},
                                                {"none", CheckpointActivations::kNone},
                                                {"layer", CheckpointActivations::kLayer},
                                                {"piece", CheckpointActivations::kPiece}});

}  // namespace

Strategy parse_strategy(const std::string& name) {
  return parse_word(kStrategies, "strategy", name);
}

const char* to_string(Strategy strategy) {
  return word_of(kStrategies, strategy);
}

const char* to_string(CheckpointActivations checkpoint_activations) {
  return word_of(kCheckpoints, checkpoint_activations);
}

void add_plan_options(PlanOptions* options, OptionList* list) {
  // --memory-budget 8 means gigabytes: no model fits in 8 bytes.
  constexpr int64_t kFewestBareBytes = 65'536;
  list->group("Plan");
  list->add("strategy", &options->strategy, kStrategies,
            "partition: cut trees into pieces and encode each token once; tree-packing: put whole "
            "trees into micro-batches, and split trees over the budget, which repeats their prefixes; "
            "append-only: encode a trajectory that another one extends as a part of it, and share nothing "
            "else; sequence-packing: encode every trajectory separately; the last two are baselines; "
            "auto: use the one with the lowest predicted time");
  list->add("token-budget", &options->token_budget,
            fmt::format("Maximum tokens per micro-batch. 0: {}, or the longest trajectory if that is "
                        "longer; with --memory-budget: no limit",
                        kDefaultTokenBudget),
            {.least = 0});
  list->add("memory-budget", &options->memory_budget,
            "Maximum memory for weights, gradients, optimiser and activations, such as 8GiB or 500MB. "
            "The fastest plan that fits is used (0: no limit)",
            {.bytes = true, .fewest_bare = kFewestBareBytes});
  list->add("checkpoint-activations", &options->checkpoint_activations, kCheckpoints,
            "Recompute activations in the backward pass instead of saving them: layer (inside every "
            "layer), piece (all of a micro-batch with descendants; strategy partition), none, or auto "
            "(the choice whose plan is the fastest that fits the memory budget; none without a budget)");
  list->add("offload-context", &options->offload_context,
            "With --checkpoint-activations piece: keep the context between micro-batches in host memory");
}

int64_t Plan::num_tokens() const {
  int64_t total = 0;
  for (const MicroBatch& batch : micro_batches) total += batch.num_tokens;
  return total;
}

int64_t Plan::num_pairs() const {
  int64_t total = 0;
  for (const MicroBatch& batch : micro_batches) total += batch.num_pairs;
  return total;
}

int64_t longest_trajectory(const Forest& forest) {
  int64_t longest = 0;
  for (int64_t r = 0; r < forest.num_trajectories(); ++r)
    longest = std::max(longest, forest.trajectory_size(r));
  return longest;
}

double effective_reuse_ratio(const Forest& forest, const Plan& plan) {
  const int64_t flat = forest.flat_tokens();
  return flat == 0 ? 0 : static_cast<double>(flat - plan.num_tokens()) / static_cast<double>(flat);
}

Layout make_micro_batch_layout(const Forest& forest, const MicroBatch& micro_batch) {
  return make_layout(forest, micro_batch.runs,
                     micro_batch.parent < 0 ? RootRuns::kAtTreeRoots : RootRuns::kContinueContext);
}

void finish_micro_batch(const Forest& forest, MicroBatch& batch) {
  check_interrupt();
  batch.num_tokens = 0;
  batch.num_pairs = 0;
  for (const Run& run : batch.runs) {
    const int64_t size = run.end - run.begin;
    batch.num_tokens += size;
    batch.num_pairs += size * token_position(forest, run.begin) + size * (size + 1) / 2;
  }
  std::sort(batch.trajectories.begin(), batch.trajectories.end(),
            [](const Placement& a, const Placement& b) { return a.trajectory < b.trajectory; });
}

}  // namespace espalier
