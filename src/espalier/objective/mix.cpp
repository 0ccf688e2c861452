// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/mix.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>
#include <vector>

#include "espalier/base/check.h"

namespace espalier {

void check_mix(std::span<const MixSource> sources) {
  ESPALIER_CHECK(!sources.empty(), "mix: expected at least one source, received none");
  std::set<std::string> names;
  for (const MixSource& source : sources) {
    const bool is_plain = std::ranges::all_of(source.name, [](unsigned char c) {
      return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
    });
    ESPALIER_CHECK(!source.name.empty() && is_plain,
                   "mix: expected names of letters, digits, `_`, `-` and `.`, received `{}`", source.name);
    ESPALIER_CHECK(names.insert(source.name).second,
                   "mix: expected distinct source names, received `{}` twice", source.name);
    ESPALIER_CHECK(source.weight > 0 && std::isfinite(source.weight),
                   "source {}: weight: expected a finite number above 0, received {}", source.name,
                   source.weight);
    ESPALIER_CHECK(!source.objective.has_router_losses(),
                   "source {}: expected no router losses, which are computed over all rows of a step",
                   source.name);
    try {
      check_objective_options(source.objective);
    } catch (const InputError& error) {
      throw InputError(fmt::format("source {}: {}", source.name, error.what()));
    }
  }
}

std::vector<int64_t> sources_of_rows(std::span<const MixSource> sources, int64_t num_rows) {
  std::vector<int64_t> result;
  for (size_t i = 0; i < sources.size(); ++i) {
    result.insert(result.end(), sources[i].num_rows, static_cast<int64_t>(i));
  }
  ESPALIER_ASSERT(static_cast<int64_t>(result.size()) == num_rows);
  return result;
}

Csr<Term> mix_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                    std::span<const MixSource> sources, Csr<int64_t>* sharers) {
  const std::vector<int64_t> source_of_row = sources_of_rows(sources, trajectories.num_rows());
  std::vector<Csr<Term>> terms(sources.size());
  std::vector<Csr<int64_t>> shared(sources.size());
  bool any = false, once = false;
  for (size_t i = 0; i < sources.size(); ++i) {
    const ObjectiveOptions& options = sources[i].objective;
    const auto takes = [&](int64_t row) { return source_of_row[row] == static_cast<int64_t>(i); };
    terms[i] = weighted_terms(trajectories, rows, forest, {options.shared_targets, takes}, &shared[i]);
    const LossSums sums = loss_sums(trajectories, rows, terms[i]);
    if (sums.rows_with_loss == 0) continue;
    any = true;
    once |= options.shared_targets == SharedTargets::kOnce;
    divide_terms(trajectories, rows, sums, options, &terms[i]);
    for (Term& term : terms[i].values) term.coefficient *= sources[i].weight;
  }
  ESPALIER_CHECK(any,
                 "no token carries loss in a step of {} trajectories (first: {}): expected a loss_mask or "
                 "loss_weights above 0 somewhere after the first token",
                 rows.size(), rows.empty() ? "none" : trajectories.name(rows[0]));
  Csr<Term> all;
  if (sharers != nullptr) *sharers = {};
  for (size_t k = 0; k < rows.size(); ++k) {
    const int64_t i = source_of_row[rows[k]], row = static_cast<int64_t>(k);
    all.push_row(terms[i].row(row));
    if (sharers == nullptr || !once) continue;
    for (int64_t term = terms[i].offsets[row]; term < terms[i].offsets[row + 1]; ++term) {
      const bool is_shared = shared[i].num_rows() > 0;
      sharers->push_row(is_shared ? std::span<const int64_t>(shared[i].row(term)) : std::span(&row, 1));
    }
  }
  return all;
}

}  // namespace espalier
