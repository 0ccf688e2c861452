#include "espalier/plan/plan.h"

#include <algorithm>

#include "espalier/base/check.h"

namespace espalier {

Strategy parse_strategy(const std::string& name) {
  for (const Strategy strategy :
       {Strategy::kAuto, Strategy::kPartition, Strategy::kTreePacking, Strategy::kSequencePacking}) {
    if (name == to_string(strategy)) return strategy;
  }
  throw InputError(fmt::format(
      "strategy: expected auto, partition, tree-packing or sequence-packing, received \"{}\"", name));
}

const char* to_string(Strategy strategy) {
  switch (strategy) {
    case Strategy::kAuto:
      return "auto";
    case Strategy::kPartition:
      return "partition";
    case Strategy::kTreePacking:
      return "tree-packing";
    case Strategy::kSequencePacking:
      break;
  }
  return "sequence-packing";
}

CheckpointActivations parse_checkpoint_activations(const std::string& name) {
  for (const CheckpointActivations value : {CheckpointActivations::kAuto, CheckpointActivations::kNone,
                                            CheckpointActivations::kLayer, CheckpointActivations::kPiece}) {
    if (name == to_string(value)) return value;
  }
  throw InputError(
      fmt::format("checkpoint-activations: expected auto, none, layer or piece, received \"{}\"", name));
}

const char* to_string(CheckpointActivations checkpoint_activations) {
  switch (checkpoint_activations) {
    case CheckpointActivations::kAuto:
      return "auto";
    case CheckpointActivations::kLayer:
      return "layer";
    case CheckpointActivations::kPiece:
      return "piece";
    case CheckpointActivations::kNone:
      break;
  }
  return "none";
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
