// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/objective.h"

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/objective/grpo.h"
#include "espalier/objective/sft.h"

namespace espalier {

bool Objective::reads(TermColumn column) const {
  const std::vector<TermColumn> read = columns();
  return std::find(read.begin(), read.end(), column) != read.end();
}

std::shared_ptr<const Objective> make_objective(const ObjectiveOptions& options) {
  switch (options.kind) {
    case ObjectiveKind::kSft:
      return std::make_shared<Sft>(options);
    case ObjectiveKind::kGrpo:
      return std::make_shared<Grpo>(options);
  }
  throw InternalError("unknown objective");
}

std::vector<std::string> data_fields(const Objective& objective) {
  std::vector<std::string> fields;
  if (objective.reads(TermColumn::kOldLogprob)) fields.emplace_back("logprobs");
  if (objective.reads(TermColumn::kAdvantage)) {
    fields.insert(fields.end(), {"advantages", "advantage", "reward"});
  }
  if (objective.reads(TermColumn::kAdvantage) || objective.scope() == Scope::kGroup) {
    fields.emplace_back("group_id");
  }
  return fields;
}

}  // namespace espalier
