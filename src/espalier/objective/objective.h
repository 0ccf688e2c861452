// SPDX-License-Identifier: Apache-2.0
// Objectives: what is minimised, as a function of log-probabilities.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/objective/options.h"

namespace espalier {

/// What the loss of a term may depend on besides its own columns: its own log-probability, those of all terms
/// of its trajectory, of its group (trajectories with equal group_id; a trajectory without one is a group of
/// its own), of its pair (equal pair_id), or of the whole step.
enum class Scope { kToken, kTrajectory, kGroup, kPair, kStep };

/// What the data say of a term, as a real number.
enum class TermColumn {
  kAdvantage,   // of the fields `advantages`, `advantage`, or `reward` with `group_id`
  kOldLogprob,  // of the behaviour policy, field `logprobs`; NaN where the trajectory has none
  kRefLogprob,  // of the reference model, field `ref_logprobs`
  kWeight,      // loss weight; a coefficient is this over the normaliser
  kChosen,      // field `chosen`: 1 or 0; -1 where the trajectory has none
};

/// How what value() gives for a metric becomes that of a step.
enum class Reduction {
  kMean,         // sums over the terms; over the number of terms of the step
  kMeanOfUnits,  // sums over trajectories, groups, pairs (Scope); over how many of them have terms
  kMin,
  kMax,
  kSum,
};

struct Metric {
  std::string name;
  Reduction reduction = Reduction::kMean;
};

/// The inputs of M terms besides their log-probabilities; float64.
struct TermTensors {
  at::Tensor coefficient;           // [M]: weight over normaliser (Term)
  std::vector<at::Tensor> columns;  // [M] each, in the order of Objective::columns()
  // Of objectives that read_topk(), undefined for others: log-probabilities of the reference model's K most
  // likely tokens in place of the term's, by the policy (differentiable) and by the reference model.
  at::Tensor topk_logprobs = {};      // [M, K]
  at::Tensor topk_ref_logprobs = {};  // [M, K]
};

/// To which of N trajectories and G units (groups, pairs, the step) the terms belong, for scopes wider than a
/// token. All terms of these units are there; every trajectory has some.
struct TermUnits {
  at::Tensor trajectory;  // [M] int64, ascending
  at::Tensor group;       // [N] int64: the unit
  int64_t num_trajectories = 0;
  int64_t num_groups = 0;
};

/// Scalars on the device of the terms: reading one waits for it.
struct ObjectiveValue {
  at::Tensor loss;                  // float64: the sum over the terms
  std::vector<at::Tensor> metrics;  // of these terms, in the order of Objective::metrics()
};

/// Bytes per loss term.
struct TermBytes {
  int64_t batch = 0;    // in the batch: coefficient, indices and the like
  int64_t graph = 0;    // kept from the objective's forward pass for its backward pass
  int64_t running = 0;  // in addition, while the objective is computed
};

/// One trajectory as the reference run sees it: n terms, ascending by position.
struct ReferenceTrajectory {
  at::Tensor logprobs;  // [n] float64, in the graph
  TermTensors terms;    // n terms
};

class Objective {
 public:
  explicit Objective(const ObjectiveOptions& options) : options_(options) {}
  virtual ~Objective() = default;

  const ObjectiveOptions& options() const { return options_; }

  virtual std::string_view name() const = 0;
  virtual Scope scope() const { return Scope::kToken; }
  /// The columns that value() reads.
  virtual std::vector<TermColumn> columns() const { return {}; }
  /// What value() gives beside the loss.
  virtual std::vector<Metric> metrics() const { return {}; }

  /// Loss of M terms from their log-probabilities [M] (float64, differentiable). `units` is empty for
  /// Scope::kToken, where terms may be cut into micro-batches in any way. Nothing is read from the device.
  virtual ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                               const TermUnits& units) const = 0;

  /// The same loss written once more, in the plainest way, for all trajectories of one unit (of one
  /// trajectory for narrow scopes): a vector of addends whose sum is the loss. `verify` trains every
  /// trajectory by itself with it.
  virtual at::Tensor reference(std::span<const ReferenceTrajectory> group) const = 0;

  /// What a term takes on the way: in Batch, in value(), and in its backward pass.
  virtual TermBytes term_bytes() const = 0;

  bool reads(TermColumn column) const;
  bool reads_topk() const { return options_.ref_topk != RefTopk::kNone; }

 private:
  ObjectiveOptions options_;
};

/// The objective that the options name.
std::shared_ptr<const Objective> make_objective(const ObjectiveOptions& options);

/// The fields of the data (docs/data-format.md) that the columns of an objective are made of.
std::vector<std::string> data_fields(const Objective& objective);

/// Objective::term_bytes, and what the reference's most likely tokens take beside them, `ref_topk` for each
/// term (Trajectories::ref_topk).
TermBytes term_bytes(const Objective& objective, int64_t ref_topk);

/// Sizes of what term_bytes() counts.
inline constexpr int64_t kTermIndexBytes = 8, kTermRealBytes = 8, kTermFlagBytes = 1;

}  // namespace espalier
