// SPDX-License-Identifier: Apache-2.0
// An objective, and the trajectories that it is computed on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/objective/advantages.h"
#include "espalier/objective/objective.h"

namespace espalier {

class Loss {
 public:
  /// The trajectories must outlive this object. Makes the advantages where the objective reads them; throws
  /// InputError naming a trajectory without what the objective needs.
  Loss(const Trajectories& trajectories, const ObjectiveOptions& options)
      : Loss(trajectories, make_objective(options)) {}
  Loss(const Trajectories& trajectories, std::shared_ptr<const Objective> objective);

  const Trajectories& trajectories() const { return *trajectories_; }
  const Objective& objective() const { return *objective_; }

  /// Of the token at `position` of a row of the data.
  double column(TermColumn column, int64_t row, int64_t position) const;

  /// The unit of the objective's scope (a trajectory for Scope::kToken) that each of the given rows belongs
  /// to, from 0 in the order of first appearance.
  std::vector<int64_t> units_of(const std::vector<int64_t>& rows) const;

 private:
  void check_rows_have(const Optional<RealColumn>& column, const char* field) const;

  const Trajectories* trajectories_;
  std::shared_ptr<const Objective> objective_;
  Advantages advantages_;
};

}  // namespace espalier
