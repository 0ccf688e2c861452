// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/router_inputs.h"

#include <ATen/ATen.h>

#include <vector>

#include "espalier/base/check.h"
#include "espalier/tree/layout.h"

namespace espalier {
namespace {

/// By run of a micro-batch: the number of trajectories placed there that pass it, and one of them.
struct RunTrajectories {
  std::vector<int64_t> count;
  std::vector<int64_t> any;
};

RunTrajectories trajectories_of_runs(const MicroBatch& micro_batch) {
  RunTrajectories result{std::vector<int64_t>(micro_batch.runs.size()),
                         std::vector<int64_t>(micro_batch.runs.size(), -1)};
  for (const Placement& placement : micro_batch.trajectories) {
    ++result.count[placement.run];
    result.any[placement.run] = placement.trajectory;
  }
  for (size_t k = micro_batch.runs.size(); k-- > 0;) {  // a run comes after its parent
    const int64_t parent = micro_batch.runs[k].parent;
    if (parent < 0) continue;
    result.count[parent] += result.count[k];
    if (result.any[parent] < 0) result.any[parent] = result.any[k];
  }
  return result;
}

}  // namespace

void set_router_inputs(const Step& step, int64_t index, const Trajectories& trajectories,
                       const RouterShape& routers, Batch* batch) {
  const MicroBatch& micro_batch = step.plan.micro_batches.at(index);
  const RunTrajectories passing = trajectories_of_runs(micro_batch);
  const int64_t width = trajectories.routes_per_token;
  std::vector<double> multiplicity;
  std::vector<int64_t> routes;
  for (size_t k = 0; k < micro_batch.runs.size(); ++k) {
    const Run& run = micro_batch.runs[k];
    ESPALIER_ASSERT(passing.any[k] >= 0);
    multiplicity.insert(multiplicity.end(), run.end - run.begin, static_cast<double>(passing.count[k]));
    if (width == 0) continue;
    const int64_t row = step.rows[passing.any[k]];
    const int64_t first = trajectories.offsets[row] + token_position(step.forest, run.begin);
    const auto run_routes = recorded_routes(trajectories, first, run.end - run.begin, routers);
    routes.insert(routes.end(), run_routes.begin(), run_routes.end());
  }
  batch->multiplicity = at::tensor(multiplicity, at::kDouble);
  if (width > 0) batch->routes = at::tensor(routes, at::kLong).view({-1, width});
}

}  // namespace espalier
