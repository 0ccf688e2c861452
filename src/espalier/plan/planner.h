// What runs together: an ordered list of micro-batches under a token budget.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/plan/cost_model.h"
#include "espalier/tree/forest.h"
#include "espalier/tree/layout.h"

namespace espalier {

enum class Strategy { kTreePacking, kSequencePacking };

/// "tree-packing" | "sequence-packing"; throws InputError naming the accepted words.
Strategy parse_strategy(const std::string& name);
const char* to_string(Strategy strategy);

/// A trajectory and the run of the micro-batch at whose end it ends.
struct Placement {
  int64_t trajectory;
  int64_t run;
};

struct MicroBatch {
  std::vector<Run> runs;                // preorder
  std::vector<Placement> trajectories;  // ascending by trajectory
  int64_t num_tokens = 0;               // sum of run lengths
  int64_t num_pairs = 0;                // visible (query, key) pairs
};

struct PlanOptions {
  Strategy strategy = Strategy::kTreePacking;
  int64_t token_budget = 0;  // tokens per micro-batch; 0: no limit (one micro-batch)
};

struct Plan {
  PlanOptions options;
  std::vector<MicroBatch> micro_batches;

  int64_t num_tokens() const;  // encoded tokens: tree tokens plus repeated prefixes
  int64_t num_pairs() const;
};

/// Plans the whole forest. Every trajectory is placed exactly once; no micro-batch exceeds the budget;
/// deterministic.
/// Tree packing: whole trees, several to a micro-batch (best-fit decreasing); a tree over the budget is split
/// by branches, depth first, and the prefix of each part repeated. Runs are nodes, and no micro-batch holds a
/// forest token twice: parts of one tree that meet in a micro-batch are joined.
/// Sequence packing: every trajectory a chain of its own (best-fit decreasing): nothing is shared. Runs are
/// stretches of the path whose forest tokens are contiguous.
/// Micro-batches stand in the order in which best-fit decreasing opens them: that of their largest item,
/// decreasing, ties in forest order (tree packing) or by trajectory (sequence packing). Inside a micro-batch
/// items stand in forest order (tree packing) or by trajectory (sequence packing).
/// Throws InputError when a single trajectory is longer than the budget, naming it and the smallest budget
/// that works, and when the budget is negative. An empty forest has no micro-batches.
Plan make_plan(const Forest& forest, const PlanOptions& options);

/// The smallest token budget that make_plan accepts: the longest trajectory; 0 in an empty forest.
int64_t smallest_token_budget(const Forest& forest);

/// Effective reuse ratio: the part of the flat tokens that the plan does not recompute,
/// (flat - plan tokens) / flat; 0 in an empty forest.
double effective_reuse_ratio(const Forest& forest, const Plan& plan);

}  // namespace espalier
