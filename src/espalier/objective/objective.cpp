// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/objective.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/objective/policy_gradient.h"
#include "espalier/objective/preference.h"

namespace espalier {

bool Objective::reads(TermColumn column) const {
  const std::vector<TermColumn> read = columns();
  return std::find(read.begin(), read.end(), column) != read.end();
}

namespace {

/// Supervised fine-tuning: cross-entropy of the tokens that carry loss.
///   loss = sum over the terms of coefficient * -log p
class Sft : public Objective {
 public:
  using Objective::Objective;

  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits&) const override {
    return {.loss = -(terms.coefficient * logprobs).sum(), .metrics = {}};
  }

  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
    std::vector<at::Tensor> addends;
    for (const ReferenceTrajectory& trajectory : group)
      addends.push_back(trajectory.terms.coefficient * -trajectory.logprobs);
    return at::cat(addends);
  }

  TermBytes term_bytes() const override {
    // Running: the log-probability and its product with the coefficient; or their gradients.
    return {.batch = kTermIndexBytes + kTermRealBytes, .graph = 0, .running = 2 * kTermRealBytes};
  }
};

}  // namespace

std::shared_ptr<const Objective> make_objective(const ObjectiveOptions& options) {
  if (auto objective = make_policy_gradient(options)) return objective;
  if (auto objective = make_preference(options)) return objective;
  if (options.kind == ObjectiveKind::kKto) return detail::make_kto(options);
  if (options.kind == ObjectiveKind::kSft) return std::make_shared<Sft>(options);
  ESPALIER_ASSERT(options.kind == ObjectiveKind::kOpd);
  return detail::make_opd(options);
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
  if (objective.is_at_row_temperature()) fields.emplace_back("temperature");
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
