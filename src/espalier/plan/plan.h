// SPDX-License-Identifier: Apache-2.0
// A plan: an ordered list of micro-batches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/tree/forest.h"
#include "espalier/tree/layout.h"

namespace espalier {

class OptionList;

enum class Strategy { kAuto, kPartition, kTreePacking, kAppendOnly, kSequencePacking };

/// "auto" | "partition" | "tree-packing" | "append-only" | "sequence-packing"; parsing throws InputError
/// naming them.
Strategy parse_strategy(const std::string& name);
const char* to_string(Strategy strategy);

/// A trajectory in a micro-batch. Its path leaves the micro-batch at the end of `run`: the trajectory ends
/// there, or (under partition) continues in a child of the micro-batch.
struct Placement {
  int64_t trajectory;
  int64_t run;
};

/// One forward and backward pass. Under partition a micro-batch inherits context: it has a parent, and its
/// root runs continue root paths that lie in the parent and the parent's ancestors.
struct MicroBatch {
  std::vector<Run> runs;                // preorder
  std::vector<Placement> trajectories;  // ascending by trajectory
  int64_t num_tokens = 0;               // sum of run lengths
  int64_t num_pairs = 0;  // visible (query, key) pairs of these tokens, keys in context included
  int64_t parent = -1;    // index of the micro-batch whose context is inherited, -1: none
  /// For each root run, in order: the run of the parent that it continues. Empty without a parent.
  std::vector<int64_t> context_runs;
};

/// Which activations are recomputed in the backward pass instead of being saved: none; those inside each
/// layer, whose input is saved; or (partition) those of every micro-batch with descendants, which saves only
/// its context. Auto is the choice whose plan is the fastest that fits the memory budget, and none without a
/// budget.
enum class CheckpointActivations { kNone, kLayer, kPiece, kAuto };

/// "auto" | "none" | "layer" | "piece"
const char* to_string(CheckpointActivations checkpoint_activations);

struct PlanOptions {
  Strategy strategy = Strategy::kTreePacking;
  int64_t token_budget = 0;  // tokens per micro-batch; 0: no limit (one micro-batch)
  CheckpointActivations checkpoint_activations = CheckpointActivations::kNone;
  bool offload_context = false;  // with kPiece: context is kept in host memory
  int64_t memory_budget = 0;     // bytes of tensors at most; 0: no limit
};

/// The token budget if neither budget is given and no trajectory is longer.
inline constexpr int64_t kDefaultTokenBudget = 4096;

void add_plan_options(PlanOptions* options, OptionList* list);

/// Micro-batches in the order of their forward passes: parent < own index, and the descendants of a
/// micro-batch follow it directly. A micro-batch's backward pass comes after those of its descendants.
struct Plan {
  PlanOptions options;  // as chosen: nothing is kAuto, token_budget is the one used
  std::vector<MicroBatch> micro_batches;

  int64_t num_tokens() const;  // encoded tokens: tree tokens plus repeated prefixes
  int64_t num_pairs() const;
};

/// The longest trajectory: the smallest token budget of tree packing and sequence packing. 0 in an empty
/// forest.
int64_t longest_trajectory(const Forest& forest);

/// Effective reuse ratio: the fraction of the flat tokens that the plan does not recompute,
/// (flat - plan tokens) / flat; 0 in an empty forest.
double effective_reuse_ratio(const Forest& forest, const Plan& plan);

/// The micro-batch's tokens in preorder, without its context.
Layout make_micro_batch_layout(const Forest& forest, const MicroBatch& micro_batch);

/// Fills num_tokens and num_pairs from the runs and sorts the placements by trajectory.
void finish_micro_batch(const Forest& forest, MicroBatch& micro_batch);

}  // namespace espalier
