// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/plan.h"

#include <algorithm>
#include <array>

#include "espalier/base/interrupt.h"
#include "espalier/base/words.h"

namespace espalier {

namespace {

constexpr auto kStrategies =
    std::to_array<Word<Strategy>>({{"auto", Strategy::kAuto},
                                   {"partition", Strategy::kPartition},
                                   {"tree-packing", Strategy::kTreePacking},
                                   {"sequence-packing", Strategy::kSequencePacking}});

constexpr auto kCheckpoints =
    std::to_array<Word<CheckpointActivations>>({{"auto", CheckpointActivations::kAuto},
                                                {"none", CheckpointActivations::kNone},
                                                {"layer", CheckpointActivations::kLayer},
                                                {"piece", CheckpointActivations::kPiece}});

}  // namespace

std::vector<std::string> strategy_names() {
  return all_words(kStrategies);
}

Strategy parse_strategy(const std::string& name) {
  return parse_word(kStrategies, "strategy", name);
}

const char* to_string(Strategy strategy) {
  return word_of(kStrategies, strategy);
}

std::vector<std::string> checkpoint_activations_names() {
  return all_words(kCheckpoints);
}

CheckpointActivations parse_checkpoint_activations(const std::string& name) {
  return parse_word(kCheckpoints, "checkpoint-activations", name);
}

const char* to_string(CheckpointActivations checkpoint_activations) {
  return word_of(kCheckpoints, checkpoint_activations);
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
