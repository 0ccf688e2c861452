// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/loss.h"

#include <limits>
#include <string>
#include <unordered_map>
#include <utility>

#include "espalier/base/check.h"

namespace espalier {

Loss::Loss(const Trajectories& trajectories, std::shared_ptr<const Objective> objective)
    : trajectories_(&trajectories), objective_(std::move(objective)) {
  if (objective_->reads(TermColumn::kAdvantage)) {
    advantages_ = Advantages(trajectories, objective_->options().scale_rewards);
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
  }
  throw InternalError("unknown column");
}

std::vector<int64_t> Loss::groups_of(const std::vector<int64_t>& rows) const {
  std::unordered_map<std::string, int64_t> known;
  std::vector<int64_t> groups;
  int64_t next = 0;
  for (const int64_t row : rows) {
    const bool named = !trajectories_->group_id.empty() && !trajectories_->group_id[row].empty();
    if (!named) {
      groups.push_back(next++);
      continue;
    }
    const auto [entry, is_new] = known.try_emplace(trajectories_->group_id[row], next);
    next += is_new;
    groups.push_back(entry->second);
  }
  return groups;
}

}  // namespace espalier
