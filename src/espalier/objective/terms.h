// SPDX-License-Identifier: Apache-2.0
// Loss terms: the tokens that carry loss in a step, and their weights.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/objective/options.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// One loss term of a trajectory: token `position` (>= 1) with its share of the loss.
struct Term {
  int64_t position;
  double coefficient;
};

/// The terms of one optimiser step: row k holds those of the k-th trajectory, ascending by position. The loss
/// of the step is sum over k, t of coefficient * l(k, t), with the l of the objective, such as -log p.
/// Coefficients contain weights and the normaliser, so the losses of micro-batches add up.
///   token:         w / (sum of all w)
///   sequence:      w / (sum of the row's w * number of rows with loss)
///   sequence-sum:  w / (number of rows with loss)
///   group:         w / (sum of the group's w * number of groups with loss); a row without group_id is a
///   group constant:      w / normalize_constant
/// `rows`: the trajectories the forest was built from, in its order. Throws InputError if there is no term.
/// `sharers`: see weighted_terms; may be null.
Csr<Term> step_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                     const ObjectiveOptions& options, Csr<int64_t>* sharers = nullptr);

/// The sums that normalisers are computed from, over all trajectories of a step. Sums of disjoint parts of a
/// step, such as those of several processes, add up.
struct LossSums {
  double weight = 0;                           // sum of the weights of all terms
  int64_t rows_with_loss = 0;                  // trajectories whose weights are not all 0
  std::map<std::string, double> group_weight;  // by name, groups whose weights are not all 0
  int64_t single_rows_with_loss = 0;           // likewise, trajectories without a group

  int64_t groups_with_loss() const {
    return static_cast<int64_t>(group_weight.size()) + single_rows_with_loss;
  }

  LossSums& operator+=(const LossSums& other);
};

/// Selects the terms of weighted_terms: `takes` selects trajectories by row of the data (empty: all).
struct TakenTerms {
  SharedTargets shared_targets = SharedTargets::kSum;
  std::function<bool(int64_t row)> takes{};
};

/// Terms with their weights as coefficients, before division by the normaliser. With SharedTargets::kOnce
/// only the first of the trajectories with loss on an edge has a term there, and row i of `sharers` is set to
/// the trajectories (positions in `rows`, ascending) that share term i; otherwise `sharers` is empty.
Csr<Term> weighted_terms(const Trajectories& trajectories, std::span<const int64_t> rows,
                         const Forest& forest, const TakenTerms& taken, Csr<int64_t>* sharers = nullptr);

/// `rows`: see weighted_terms.
LossSums loss_sums(const Trajectories& trajectories, std::span<const int64_t> rows,
                   const Csr<Term>& weighted);

/// Divides weights by the normaliser computed from `sums`, the sums of the whole step. step_terms is
/// weighted_terms divided by its own sums.
void divide_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const LossSums& sums,
                  const ObjectiveOptions& options, Csr<Term>* weighted);

/// The terms of a row at `position` or later.
std::span<const Term> terms_from(std::span<const Term> terms, int64_t position);

/// step_terms if any row carries loss, otherwise all_terms, so that plans can be made for data without loss.
Csr<Term> step_terms_or_all(const Trajectories& trajectories, std::span<const int64_t> rows,
                            const Forest& forest, const ObjectiveOptions& options);

/// A term with coefficient 1 for every token but the first of each row.
Csr<Term> all_terms(const Trajectories& trajectories, std::span<const int64_t> rows);

}  // namespace espalier
