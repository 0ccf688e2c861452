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
  std::vector<Run> runs;               // preorder
  std::vector<Placement> trajectories;  // ascending by trajectory
  int64_t num_tokens = 0;              // sum of run lengths
  int64_t num_pairs = 0;               // visible (query, key) pairs
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
/// by branches and the prefix of each part repeated.
/// Sequence packing: every trajectory a chain of its own (best-fit decreasing): nothing is shared.
/// Throws InputError when a single trajectory is longer than the budget, naming it and the smallest budget
/// that works.
Plan make_plan(const Forest& forest, const PlanOptions& options);

/// Effective reuse ratio: the part of the flat tokens that the plan does not recompute.
double effective_reuse_ratio(const Forest& forest, const Plan& plan);

}  // namespace espalier
