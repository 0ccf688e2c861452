// SPDX-License-Identifier: Apache-2.0
// An objective bound to the trajectories it is computed on, or a mix of objectives, each on its own rows.
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
  /// The trajectories must outlive this object. Computes advantages if the objective reads them. Throws
  /// InputError naming a trajectory that lacks a field the objective needs.
  Loss(const Trajectories& trajectories, const ObjectiveOptions& options)
      : Loss(trajectories, make_objective(options)) {}
  Loss(const Trajectories& trajectories, std::shared_ptr<const Objective> objective);

  /// The cross-entropy of the tokens, whose logits are divided by Trajectories::logit_temperature.
  static Loss at_row_temperatures(const Trajectories& trajectories);

  /// A mix: each source's objective on its rows (mix.h). Errors also name the source.
  Loss(const Trajectories& trajectories, std::span<const MixSource> sources);

  const Trajectories& trajectories() const { return *trajectories_; }
  /// The objective. Must not be called on a mix.
  const Objective& objective() const;

  bool is_mix() const { return !parts_.empty(); }
  /// Number of sources of a mix; 1 for a single objective, which is its own only part.
  int64_t num_parts() const { return is_mix() ? std::ssize(parts_) : 1; }
  /// The loss of source i. Its trajectories are the rows of that source, numbered from 0.
  const Loss& part(int64_t i) const { return is_mix() ? *parts_[i].loss : *this; }
  const std::string& part_name(int64_t i) const { return parts_.at(i).name; }
  double part_weight(int64_t i) const { return is_mix() ? parts_[i].weight : 1; }
  int64_t first_row(int64_t i) const { return is_mix() ? parts_[i].first_row : 0; }
  int64_t part_of(int64_t row) const;
  /// Whether some objective's scope is wider than a token.
  bool is_wide() const;
  /// The options that hold the coefficients of router losses; all 0 for a mix.
  const ObjectiveOptions& router_options() const;

  /// The union of the columns that the objectives read.
  std::vector<TermColumn> columns() const;
  bool reads_topk() const;
  /// Selects the terms of a part from `terms`, whose columns are columns(), and the columns that its
  /// objective reads. `index` [M'] int64: the terms to take; undefined: all.
  TermTensors terms_of_part(int64_t part, const TermTensors& terms, const at::Tensor& index) const;

  /// The column's value for the token at `position` of a row; NaN if the row's objective does not read it.
  double column(TermColumn column, int64_t row, int64_t position) const;

  /// What the logits of the row's terms are divided by: Trajectories::logit_temperature if its objective
  /// is_at_row_temperature(), else 1.
  double logit_temperature(int64_t row) const;
  /// Whether that is not 1 for some row.
  bool divides_logits() const;
  /// The cross-entropy of the tokens, with logits divided in the same way.
  Loss of_tokens() const;

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
  std::vector<double> logit_temperatures_;  // by row; empty if all are 1, and in a mix
  std::vector<Part> parts_;                 // empty unless it is a mix
};

/// A loss of the mix, or of the objective if the mix is empty.
Loss make_loss(const Trajectories& trajectories, const ObjectiveOptions& objective,
               std::span<const MixSource> mix);

}  // namespace espalier
