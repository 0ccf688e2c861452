// SPDX-License-Identifier: Apache-2.0
// An objective, and the trajectories that it is computed on; or several, each on rows of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/objective/advantages.h"
#include "espalier/objective/mix.h"
#include "espalier/objective/objective.h"

namespace espalier {

class Loss {
 public:
  /// The trajectories must outlive this object. Makes the advantages where the objective reads them; throws
  /// InputError naming a trajectory without what the objective needs.
  Loss(const Trajectories& trajectories, const ObjectiveOptions& options)
      : Loss(trajectories, make_objective(options)) {}
  Loss(const Trajectories& trajectories, std::shared_ptr<const Objective> objective);

  /// A mix: every source's objective on its rows (mix.h). Likewise; faults are named by the source.
  Loss(const Trajectories& trajectories, std::span<const MixSource> sources);

  const Trajectories& trajectories() const { return *trajectories_; }
  /// Of a loss that is no mix.
  const Objective& objective() const;

  bool is_mix() const { return !parts_.empty(); }
  /// The sources of a mix; a loss that is none is its own only part.
  int64_t num_parts() const { return is_mix() ? std::ssize(parts_) : 1; }
  /// The loss of a source, whose trajectories are its rows alone, counted from its first one.
  const Loss& part(int64_t i) const { return is_mix() ? *parts_[i].loss : *this; }
  const std::string& part_name(int64_t i) const { return parts_.at(i).name; }
  double part_weight(int64_t i) const { return is_mix() ? parts_[i].weight : 1; }
  int64_t first_row(int64_t i) const { return is_mix() ? parts_[i].first_row : 0; }
  int64_t part_of(int64_t row) const;
  /// Whether some objective's scope is wider than a token.
  bool is_wide() const;
  /// Coefficients of the losses of routers, which a mix has none of.
  const ObjectiveOptions& router_options() const;

  /// The columns that the objectives read.
  std::vector<TermColumn> columns() const;
  bool reads_topk() const;
  /// Of terms whose columns are those of columns(): those of a part, with the columns of its objective. The
  /// index [M'] int64 says which these are; undefined: all.
  TermTensors terms_of_part(int64_t part, const TermTensors& terms, const at::Tensor& index) const;

  /// Of the token at `position` of a row of the data; NaN where the row's objective does not read it.
  double column(TermColumn column, int64_t row, int64_t position) const;

  /// The unit of the objective's scope (a trajectory for Scope::kToken) that each of the given rows belongs
  /// to, from 0 in the order of first appearance.
  std::vector<int64_t> units_of(const std::vector<int64_t>& rows) const;

 private:
  void check_ref_topk() const;
  std::vector<int64_t> units_of_mix(const std::vector<int64_t>& rows) const;
  void check_rows_have(const Optional<RealColumn>& column, const char* field) const;

  struct Part {
    std::string name;
    double weight;
    int64_t first_row;
    std::shared_ptr<const Trajectories> trajectories;
    std::shared_ptr<const Loss> loss;
  };

  const Trajectories* trajectories_;
  std::shared_ptr<const Objective> objective_;  // null in a mix
  Advantages advantages_;
  std::vector<Part> parts_;  // empty unless it is a mix
};

/// The mix, or where there are no sources, the objective.
Loss make_loss(const Trajectories& trajectories, const ObjectiveOptions& objective,
               std::span<const MixSource> mix);

}  // namespace espalier
