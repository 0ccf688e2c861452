// SPDX-License-Identifier: Apache-2.0
// Objectives: the function of log-probabilities that is minimised.
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

/// The log-probabilities that the loss of a term may depend on: its own, or those of all terms of its
/// trajectory, of its group (equal group_id; a trajectory without one is a group by itself), of its pair
/// (equal pair_id), or of the whole step.
enum class Scope { kToken, kTrajectory, kGroup, kPair, kStep };

/// A real-valued column of the data, read for each term.
enum class TermColumn {
  kAdvantage,   // from the fields `advantages`, `advantage`, or `reward` with `group_id`
  kOldLogprob,  // log-probability of the behaviour policy, field `logprobs`; NaN if the trajectory has none
  kRefLogprob,  // log-probability of the reference model, field `ref_logprobs`
  kWeight,      // loss weight; the coefficient is this divided by the normaliser
  kChosen,      // field `chosen`: 1 or 0; -1 if the trajectory has none
};

/// How the values that value() returns for a metric are reduced over a step.
enum class Reduction {
  kMean,         // value() returns sums over terms; divided by the number of terms of the step
  kMeanOfUnits,  // likewise over units of the scope; divided by the number of units with terms
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
  at::Tensor coefficient;           // [M]: weight / normaliser (Term)
  std::vector<at::Tensor> columns;  // [M] each, in the order of Objective::columns()
  // Undefined unless the objective reads_topk(): log-probabilities of the reference model's K most likely
  // tokens at the term's position, under the policy (differentiable) and under the reference model.
  at::Tensor topk_logprobs = {};      // [M, K]
  at::Tensor topk_ref_logprobs = {};  // [M, K]
};

/// The trajectory (of N) and unit (of G groups or pairs, or the step) of each term, for scopes wider than a
/// token. Contains all terms of these units; every trajectory has at least one term.
struct TermUnits {
  at::Tensor trajectory;  // [M] int64, ascending
  at::Tensor group;       // [N] int64: the unit of each trajectory
  int64_t num_trajectories = 0;
  int64_t num_groups = 0;
};

/// Scalars on the device of the terms; reading one synchronises with it.
struct ObjectiveValue {
  at::Tensor loss;                  // float64: sum over the terms
  std::vector<at::Tensor> metrics;  // over these terms, in the order of Objective::metrics()
};

/// Bytes per loss term.
struct TermBytes {
  int64_t batch = 0;    // in the batch: coefficient, indices and so on
  int64_t graph = 0;    // saved by the objective's forward pass for its backward pass
  int64_t running = 0;  // in addition, while the objective is computed
};

/// One trajectory in the per-trajectory reference: n terms, ascending by position.
struct ReferenceTrajectory {
  at::Tensor logprobs;  // [n] float64, in the graph
  TermTensors terms;    // n terms
};

class Objective {
 public:
  explicit Objective(const ObjectiveOptions& options) : options_(options) {}
  virtual ~Objective() = default;

  const ObjectiveOptions& options() const { return options_; }

  virtual std::string_view name() const { return to_string(options_.kind); }
  virtual Scope scope() const { return Scope::kToken; }
  /// The columns that value() reads.
  virtual std::vector<TermColumn> columns() const { return {}; }
  /// The metrics that value() returns beside the loss.
  virtual std::vector<Metric> metrics() const { return {}; }

  /// Loss of M terms from their log-probabilities [M] (float64, differentiable). `units` is empty for
  /// Scope::kToken, where terms may be split over micro-batches in any way. Does not synchronise with the
  /// device.
  virtual ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                               const TermUnits& units) const = 0;

  /// An independent, straightforward implementation of the same loss for all trajectories of one unit (one
  /// trajectory for Scope::kToken): a vector of addends whose sum is the loss. `verify` compares against it.
  virtual at::Tensor reference(std::span<const ReferenceTrajectory> group) const = 0;

  /// Memory per term in Batch, in value() and in its backward pass.
  virtual TermBytes term_bytes() const = 0;

  bool reads(TermColumn column) const;
  /// Whether it compares log-probabilities with recorded ones, which are at the temperature of their row.
  virtual bool is_at_row_temperature() const {
    return reads(TermColumn::kOldLogprob) || reads(TermColumn::kRefLogprob);
  }
  bool reads_topk() const { return options_.ref_topk != RefTopk::kNone; }

 private:
  ObjectiveOptions options_;
};

/// Creates the objective named by the options.
std::shared_ptr<const Objective> make_objective(const ObjectiveOptions& options);

namespace detail {

/// Parts of make_objective, each for the options of one kind.
std::shared_ptr<const Objective> make_opd(const ObjectiveOptions& options);
std::shared_ptr<const Objective> make_kto(const ObjectiveOptions& options);

}  // namespace detail

/// The data fields (docs/data-format.md) that the columns of an objective are computed from.
std::vector<std::string> data_fields(const Objective& objective);

/// Objective::term_bytes plus the bytes of `ref_topk` tokens of the reference model per term
/// (Trajectories::ref_topk).
TermBytes term_bytes(const Objective& objective, int64_t ref_topk);

/// Element sizes used by term_bytes().
inline constexpr int64_t kTermIndexBytes = 8, kTermRealBytes = 8, kTermFlagBytes = 1;

}  // namespace espalier
