// SPDX-License-Identifier: Apache-2.0
// Loss terms: which tokens carry loss in a step, and with what weight.
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
/// of the step is sum over k, t of coefficient * l(k, t), with the l of the objective, such as -log p; the
/// coefficients contain weights and the normaliser, so micro-batches simply add up.
///   token:         w / (sum of all w)
///   sequence:      w / (sum of the row's w * number of rows with loss)
///   sequence-sum:  w / (number of rows with loss)
///   group:         w / (sum of the group's w * number of groups with loss); a row without a group_id is one
///   constant:      w / normalize_constant
/// `rows` are the trajectories the forest was built from, in its order. Throws InputError when no term is
/// left. `sharers`, where it is given: as of weighted_terms.
Csr<Term> step_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                     const ObjectiveOptions& options, Csr<int64_t>* sharers = nullptr);

/// What a loss is divided by is made of: sums over all trajectories of a step, which may be spread over
/// several processes. Sums of parts add up.
struct LossSums {
  double weight = 0;                           // of all terms
  int64_t rows_with_loss = 0;                  // trajectories whose weights are not all 0
  std::map<std::string, double> group_weight;  // of named groups whose weights are not all 0
  int64_t single_rows_with_loss = 0;           // trajectories without a group, likewise

  int64_t groups_with_loss() const {
    return static_cast<int64_t>(group_weight.size()) + single_rows_with_loss;
  }

  LossSums& operator+=(const LossSums& other);
};

/// Which trajectories weighted_terms takes terms of, by their row of the data (empty: all), and how many of
/// those with loss on one edge.
struct TakenTerms {
  SharedTargets shared_targets = SharedTargets::kSum;
  std::function<bool(int64_t row)> takes{};
};

/// Terms whose coefficients are still their weights. With SharedTargets::kOnce, of the trajectories that
/// carry loss on the same edge only the first one has a term there, and row i of `sharers` becomes the
/// trajectories (positions in `rows`, ascending) that term i stands for; otherwise it stays empty.
Csr<Term> weighted_terms(const Trajectories& trajectories, std::span<const int64_t> rows,
                         const Forest& forest, const TakenTerms& taken, Csr<int64_t>* sharers = nullptr);

/// `rows`: as of weighted_terms.
LossSums loss_sums(const Trajectories& trajectories, std::span<const int64_t> rows,
                   const Csr<Term>& weighted);

/// Divides weights by the normaliser that `sums`, those of the whole step, give: step_terms is
/// weighted_terms, divided by their own sums.
void divide_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const LossSums& sums,
                  const ObjectiveOptions& options, Csr<Term>* weighted);

/// Those of a row's terms that stand at `position` or later.
std::span<const Term> terms_from(std::span<const Term> terms, int64_t position);

/// step_terms where any row carries loss; otherwise all_terms, so that data without loss yet can be counted.
Csr<Term> step_terms_or_all(const Trajectories& trajectories, std::span<const int64_t> rows,
                            const Forest& forest, const ObjectiveOptions& options);

/// Every token of every row but the first, with coefficient 1.
Csr<Term> all_terms(const Trajectories& trajectories, std::span<const int64_t> rows);

}  // namespace espalier
