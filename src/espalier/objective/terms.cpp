// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/terms.h"

#include <algorithm>
#include <vector>

#include "espalier/base/check.h"

namespace espalier {
namespace {

// Calls visit(position, forest token) for every token of trajectory k of the forest but its first.
template <typename Visit>
void for_each_target(const Forest& forest, int64_t k, Visit visit) {
  for (const int64_t node : root_path(forest, forest.end_node[k])) {
    for (int64_t i = 0; i < forest.node_size(node); ++i) {
      const int64_t position = forest.position[node] + i;
      if (position >= 1) visit(position, forest.node_begin[node] + i);
    }
  }
}

}  // namespace

Csr<Term> weighted_terms(const Trajectories& trajectories, std::span<const int64_t> rows,
                         const Forest& forest, SharedTargets shared_targets) {
  Csr<Term> terms;
  std::vector<bool> taken;
  if (shared_targets == SharedTargets::kOnce) taken.resize(forest.tree_tokens());
  for (size_t k = 0; k < rows.size(); ++k) {
    const int64_t begin = trajectories.offsets[rows[k]];
    for_each_target(forest, static_cast<int64_t>(k), [&](int64_t position, int64_t token) {
      const double weight = trajectories.loss_weights[begin + position];
      if (weight == 0) return;
      if (shared_targets == SharedTargets::kOnce) {
        if (taken[token]) return;
        taken[token] = true;
      }
      terms.values.push_back({position, weight});
    });
    terms.end_row();
  }
  return terms;
}

LossSums& LossSums::operator+=(const LossSums& other) {
  weight += other.weight;
  rows_with_loss += other.rows_with_loss;
  return *this;
}

namespace {

double row_weight(std::span<const Term> terms) {
  double sum = 0;
  for (const Term& term : terms) sum += term.coefficient;
  return sum;
}

}  // namespace

LossSums loss_sums(const Csr<Term>& weighted) {
  LossSums sums;
  for (int64_t k = 0; k < weighted.num_rows(); ++k) {
    const double weight = row_weight(weighted.row(k));
    sums += {weight, weight > 0 ? 1 : 0};
  }
  return sums;
}

void divide_terms(const LossSums& sums, const ObjectiveOptions& options, Csr<Term>* weighted) {
  for (int64_t k = 0; k < weighted->num_rows(); ++k) {
    const double of_row = row_weight(weighted->row(k));
    const double normaliser = options.normalize == Normalize::kToken ? sums.weight
                              : options.normalize == Normalize::kSequence
                                  ? of_row * static_cast<double>(sums.rows_with_loss)
                                  : options.normalize_constant;
    for (Term& term : weighted->row(k)) term.coefficient /= normaliser;
  }
}

Csr<Term> step_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                     const ObjectiveOptions& options) {
  Csr<Term> terms = weighted_terms(trajectories, rows, forest, options.shared_targets);
  const LossSums sums = loss_sums(terms);
  ESPALIER_CHECK(sums.rows_with_loss > 0,
                 "no token carries loss in a step of {} trajectories (first: {}): expected a loss_mask or "
                 "loss_weights above 0 somewhere after the first token",
                 rows.size(), rows.empty() ? "none" : trajectories.name(rows[0]));
  divide_terms(sums, options, &terms);
  return terms;
}

std::span<const Term> terms_from(std::span<const Term> terms, int64_t position) {
  const auto begin =
      std::lower_bound(terms.begin(), terms.end(), position,
                       [](const Term& term, int64_t wanted) { return term.position < wanted; });
  return {begin, terms.end()};
}

Csr<Term> step_terms_or_all(const Trajectories& trajectories, std::span<const int64_t> rows,
                            const Forest& forest, const ObjectiveOptions& options) {
  for (const int64_t row : rows) {
    for (int64_t i = trajectories.offsets[row] + 1; i < trajectories.offsets[row + 1]; ++i) {
      if (trajectories.loss_weights[i] > 0) return step_terms(trajectories, rows, forest, options);
    }
  }
  return all_terms(trajectories, rows);
}

Csr<Term> all_terms(const Trajectories& trajectories, std::span<const int64_t> rows) {
  Csr<Term> terms;
  for (const int64_t row : rows) {
    for (int64_t position = 1; position < trajectories.row_size(row); ++position) {
      terms.values.push_back({position, 1.0});
    }
    terms.end_row();
  }
  return terms;
}

}  // namespace espalier
