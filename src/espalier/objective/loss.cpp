// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/loss.h"

#include <limits>
#include <string>
#include <unordered_map>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/objective/pairs.h"

namespace espalier {

Loss::Loss(const Trajectories& trajectories, std::shared_ptr<const Objective> objective)
    : trajectories_(&trajectories), objective_(std::move(objective)) {
  if (objective_->reads(TermColumn::kAdvantage)) {
    advantages_ = Advantages(trajectories, objective_->options());
  }
  if (objective_->scope() == Scope::kPair) check_pairs(trajectories);
  if (objective_->options().kind == ObjectiveKind::kKto) check_some_chosen(trajectories);
  if (objective_->reads(TermColumn::kRefLogprob)) check_rows_have(trajectories.ref_logprobs, "ref_logprobs");
  const bool weighs = objective_->options().importance_weights != ImportanceWeights::kNone;
  if (weighs && objective_->reads(TermColumn::kOldLogprob)) {
    ESPALIER_CHECK(trajectories.logprobs.any(),
                   "objective {} with importance-weights {} expects `logprobs`; received none in {} "
                   "trajectories",
                   objective_->name(), to_string(objective_->options().importance_weights),
                   trajectories.num_rows());
  }
}

void Loss::check_rows_have(const Optional<RealColumn>& column, const char* field) const {
  for (int64_t row = 0; row < trajectories_->num_rows(); ++row) {
    ESPALIER_CHECK(column.has(row), "trajectory {} (row {}): objective {} expects `{}`; received none",
                   trajectories_->name(row), row, objective_->name(), field);
  }
}

double Loss::column(TermColumn column, int64_t row, int64_t position) const {
  switch (column) {
    case TermColumn::kAdvantage:
      return advantages_.at(row, position);
    case TermColumn::kOldLogprob:
      return trajectories_->logprobs.has(row)
                 ? trajectories_->logprobs.values[trajectories_->offsets[row] + position]
                 : std::numeric_limits<double>::quiet_NaN();
    case TermColumn::kRefLogprob:
      return trajectories_->ref_logprobs.values[trajectories_->offsets[row] + position];
    case TermColumn::kWeight:
      return trajectories_->loss_weights[trajectories_->offsets[row] + position];
    case TermColumn::kChosen:
      return trajectories_->chosen.has(row) ? static_cast<double>(trajectories_->chosen.values[row]) : -1;
  }
  throw InternalError("unknown column");
}

std::vector<int64_t> Loss::units_of(const std::vector<int64_t>& rows) const {
  const Scope scope = objective_->scope();
  if (scope == Scope::kStep) return std::vector<int64_t>(rows.size());
  static const std::vector<std::string> none;
  const std::vector<std::string>& names = scope == Scope::kGroup  ? trajectories_->group_id
                                          : scope == Scope::kPair ? trajectories_->pair_id
                                                                  : none;
  std::unordered_map<std::string, int64_t> known;
  std::vector<int64_t> units;
  int64_t next = 0;
  for (const int64_t row : rows) {
    if (names.empty() || names[row].empty()) {
      units.push_back(next++);
      continue;
    }
    const auto [entry, is_new] = known.try_emplace(names[row], next);
    next += is_new;
    units.push_back(entry->second);
  }
  return units;
}

}  // namespace espalier
