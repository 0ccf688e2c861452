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
                         const Forest& forest, const TakenTerms& taken, Csr<int64_t>* sharers) {
  Csr<Term> terms;
  const bool once = taken.shared_targets == SharedTargets::kOnce;
  ESPALIER_CHECK(!once || trajectories.target_ids.empty(),
                 "shared_targets: expected sum with target_ids, received once");
  std::vector<int64_t> term_of_token(once ? forest.tree_tokens() : 0, -1);
  std::vector<std::vector<int64_t>> sharers_of_term;  // by term
  for (size_t k = 0; k < rows.size(); ++k) {
    if (taken.takes && !taken.takes(rows[k])) {
      terms.end_row();
      continue;
    }
    const int64_t begin = trajectories.offsets[rows[k]];
    for_each_target(forest, static_cast<int64_t>(k), [&](int64_t position, int64_t token) {
      const double weight = trajectories.loss_weights[begin + position];
      if (weight == 0) return;
      if (once) {
        const bool is_taken = term_of_token[token] >= 0;
        if (!is_taken) term_of_token[token] = static_cast<int64_t>(sharers_of_term.size());
        if (!is_taken) sharers_of_term.emplace_back();
        sharers_of_term[term_of_token[token]].push_back(static_cast<int64_t>(k));
        if (is_taken) return;
      }
      terms.values.push_back({position, weight});
    });
    terms.end_row();
  }
  if (sharers == nullptr) return terms;
  *sharers = {};
  for (const std::vector<int64_t>& term_sharers : sharers_of_term) sharers->push_row(term_sharers);
  return terms;
}

LossSums& LossSums::operator+=(const LossSums& other) {
  weight += other.weight;
  rows_with_loss += other.rows_with_loss;
  single_rows_with_loss += other.single_rows_with_loss;
  for (const auto& [group, other_weight] : other.group_weight) group_weight[group] += other_weight;
  return *this;
}

namespace {

double row_weight(std::span<const Term> terms) {
  double sum = 0;
  for (const Term& term : terms) sum += term.coefficient;
  return sum;
}

bool has_group(const Trajectories& trajectories, int64_t row) {
  return !trajectories.group_id.empty() && !trajectories.group_id[row].empty();
}

}  // namespace

LossSums loss_sums(const Trajectories& trajectories, std::span<const int64_t> rows,
                   const Csr<Term>& weighted) {
  LossSums sums;
  for (int64_t k = 0; k < weighted.num_rows(); ++k) {
    const double weight = row_weight(weighted.row(k));
    if (weight == 0) continue;
    sums.weight += weight;
    ++sums.rows_with_loss;
    if (has_group(trajectories, rows[k])) {
      sums.group_weight[trajectories.group_id[rows[k]]] += weight;
    } else {
      ++sums.single_rows_with_loss;
    }
  }
  return sums;
}

void divide_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const LossSums& sums,
                  const ObjectiveOptions& options, Csr<Term>* weighted) {
  const auto normaliser = [&](int64_t row, double row_sum) {
    switch (options.normalize) {
      case Normalize::kToken:
        return sums.weight;
      case Normalize::kSequence:
        return row_sum * static_cast<double>(sums.rows_with_loss);
      case Normalize::kSequenceSum:
        return static_cast<double>(sums.rows_with_loss);
      case Normalize::kGroup:
        return (has_group(trajectories, row) ? sums.group_weight.at(trajectories.group_id[row]) : row_sum) *
               static_cast<double>(sums.groups_with_loss());
      case Normalize::kConstant:
        return options.normalize_constant;
    }
    throw InternalError("unknown normalize");
  };
  for (int64_t k = 0; k < weighted->num_rows(); ++k) {
    if (weighted->row_size(k) == 0) continue;
    const double divisor = normaliser(rows[k], row_weight(weighted->row(k)));
    for (Term& term : weighted->row(k)) term.coefficient /= divisor;
  }
}

Csr<Term> step_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                     const ObjectiveOptions& options, Csr<int64_t>* sharers) {
  Csr<Term> terms = weighted_terms(trajectories, rows, forest, {options.shared_targets}, sharers);
  const LossSums sums = loss_sums(trajectories, rows, terms);
  ESPALIER_CHECK(sums.rows_with_loss > 0,
                 "no token carries loss in a step of {} trajectories (first: {}): expected a loss_mask or "
                 "loss_weights above 0 somewhere after the first token",
                 rows.size(), rows.empty() ? "none" : trajectories.name(rows[0]));
  divide_terms(trajectories, rows, sums, options, &terms);
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
