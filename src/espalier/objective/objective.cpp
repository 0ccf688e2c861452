// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/objective.h"

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/objective/cispo.h"
#include "espalier/objective/dpo.h"
#include "espalier/objective/grpo.h"
#include "espalier/objective/gspo.h"
#include "espalier/objective/ipo.h"
#include "espalier/objective/kto.h"
#include "espalier/objective/opd.h"
#include "espalier/objective/opd_topk.h"
#include "espalier/objective/orpo.h"
#include "espalier/objective/reinforce.h"
#include "espalier/objective/sft.h"
#include "espalier/objective/simpo.h"

namespace espalier {

bool Objective::reads(TermColumn column) const {
  const std::vector<TermColumn> read = columns();
  return std::find(read.begin(), read.end(), column) != read.end();
}

std::shared_ptr<const Objective> make_objective(const ObjectiveOptions& options) {
  switch (options.kind) {
    case ObjectiveKind::kSft:
      return std::make_shared<Sft>(options);
    case ObjectiveKind::kPpo:
    case ObjectiveKind::kGrpo:
    case ObjectiveKind::kDrGrpo:
    case ObjectiveKind::kDapo:
      return std::make_shared<Grpo>(options);
    case ObjectiveKind::kGspo:
      return std::make_shared<Gspo>(options);
    case ObjectiveKind::kCispo:
      return std::make_shared<Cispo>(options);
    case ObjectiveKind::kReinforce:
      return std::make_shared<Reinforce>(options);
    case ObjectiveKind::kOpd:
      if (options.ref_topk != RefTopk::kNone) return std::make_shared<OpdTopk>(options);
      return std::make_shared<Opd>(options);
    case ObjectiveKind::kDpo:
      return std::make_shared<Dpo>(options);
    case ObjectiveKind::kIpo:
      return std::make_shared<Ipo>(options);
    case ObjectiveKind::kKto:
      return std::make_shared<Kto>(options);
    case ObjectiveKind::kSimpo:
      return std::make_shared<Simpo>(options);
    case ObjectiveKind::kOrpo:
      return std::make_shared<Orpo>(options);
  }
  throw InternalError("unknown objective");
}

TermBytes term_bytes(const Objective& objective, int64_t ref_topk) {
  TermBytes bytes = objective.term_bytes();
  if (!objective.reads_topk()) return bytes;
  // Batch: row, target and index of the edge, log-probability of the reference. Graph: log-probability of the
  // edge and the term, its exponential and differences. Running: their gradients.
  bytes.batch += ref_topk * (3 * kTermIndexBytes + kTermRealBytes);
  bytes.graph += ref_topk * 4 * kTermRealBytes;
  bytes.running += ref_topk * 4 * kTermRealBytes;
  return bytes;
}

std::vector<std::string> data_fields(const Objective& objective) {
  std::vector<std::string> fields;
  if (objective.reads(TermColumn::kOldLogprob)) fields.emplace_back("logprobs");
  if (objective.reads(TermColumn::kRefLogprob) || objective.options().has_kl_in(KlPlace::kReward)) {
    fields.emplace_back("ref_logprobs");
  }
  if (objective.reads_topk()) fields.insert(fields.end(), {"ref_topk_ids", "ref_topk_logprobs"});
  if (objective.reads(TermColumn::kAdvantage)) {
    fields.insert(fields.end(), {"advantages", "advantage", "reward", "turn_rewards"});
  }
  if (objective.reads(TermColumn::kChosen)) fields.emplace_back("chosen");
  if (objective.scope() == Scope::kPair) fields.emplace_back("pair_id");
  const bool counts_groups = objective.options().normalize == Normalize::kGroup;
  if (objective.reads(TermColumn::kAdvantage) || counts_groups || objective.scope() == Scope::kGroup) {
    fields.emplace_back("group_id");
  }
  return fields;
}

}  // namespace espalier
