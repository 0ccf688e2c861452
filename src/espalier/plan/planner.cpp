#include "espalier/plan/planner.h"

#include <limits>

#include "espalier/base/check.h"
#include "espalier/plan/sequence_packing.h"
#include "espalier/plan/tree_packing.h"

namespace espalier {
namespace {

void check_budget(const Forest& forest, int64_t budget) {
  ESPALIER_CHECK(budget >= 0, "token budget: expected at least 1, or 0 for no limit, received {}", budget);
  if (budget == 0) return;
  const int64_t smallest = longest_trajectory(forest);
  if (smallest <= budget) return;
  int64_t r = 0;
  while (forest.trajectory_size(r) <= budget) ++r;
  throw InputError(fmt::format(
      "trajectory {} has {} tokens, more than the token budget {}: expected a budget of at least {}, "
      "the longest trajectory",
      r, forest.trajectory_size(r), budget, smallest));
}

}  // namespace

Plan make_plan(const Forest& forest, const PlanOptions& options) {
  check_budget(forest, options.token_budget);
  const int64_t budget =
      options.token_budget > 0 ? options.token_budget : std::numeric_limits<int64_t>::max();
  return {options, options.strategy == Strategy::kTreePacking ? pack_trees(forest, budget)
                                                              : pack_sequences(forest, budget)};
}

}  // namespace espalier
