// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/loss.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/option_names.h"
#include "espalier/data/trajectories.h"

namespace espalier {
namespace {

void check_has_loss(const Trajectories& trajectories, int64_t row) {
  for (int64_t i = trajectories.offsets[row] + 1; i < trajectories.offsets[row + 1]; ++i) {
    if (trajectories.loss_weights[i] > 0) return;
  }
  throw InputError(fmt::format("trajectory {} (row {}): a preference expects tokens with loss; received none",
                               trajectories.name(row), row));
}

/// Trajectories::logit_temperature by row; empty if all are 1.
std::vector<double> temperatures_of(const Trajectories& trajectories) {
  if (!trajectories.temperature.any()) return {};
  std::vector<double> temperatures;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    temperatures.push_back(trajectories.logit_temperature(row));
  }
  const bool are_one = std::ranges::all_of(temperatures, [](double value) { return value == 1; });
  return are_one ? std::vector<double>() : temperatures;
}

/// Throws InputError naming a trajectory or pair unless every trajectory has `pair_id` and `chosen`, and
/// every pair has one chosen and one rejected trajectory, each with a token that carries loss.
void check_pairs(const Trajectories& trajectories) {
  struct Pair {
    std::array<int64_t, 2> rows{-1, -1};  // rejected, chosen
  };
  std::map<std::string, Pair> pairs;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const bool is_named = !trajectories.pair_id.empty() && !trajectories.pair_id[row].empty();
    ESPALIER_CHECK(is_named && trajectories.chosen.has(row),
                   "trajectory {} (row {}): a preference expects `pair_id` and `chosen`; received {}",
                   trajectories.name(row), row,
                   is_named                       ? "no `chosen`"
                   : trajectories.chosen.has(row) ? "no `pair_id`"
                                                  : "neither of them");
    const bool chosen = trajectories.chosen.values[row] != 0;
    int64_t& place = pairs[trajectories.pair_id[row]].rows[chosen ? 1 : 0];
    ESPALIER_CHECK(place < 0, "pair {}: expected one {} trajectory, received rows {} and {}",
                   trajectories.pair_id[row], chosen ? "chosen" : "rejected", place, row);
    check_has_loss(trajectories, row);
    place = row;
  }
  for (const auto& [name, pair] : pairs) {
    for (const int side : {0, 1}) {
      ESPALIER_CHECK(pair.rows[side] >= 0,
                     "pair {}: expected a chosen and a rejected trajectory, received row {} alone, which is "
                     "{} ({} may have cut the other one off)",
                     name, pair.rows[1 - side], side == 0 ? "chosen" : "rejected", named("limit"));
    }
  }
}

/// Throws InputError naming a trajectory without loss, which would not count in means, or if no trajectory
/// has `chosen`.
void check_kto_rows(const Trajectories& trajectories) {
  bool any_chosen = false;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    check_has_loss(trajectories, row);
    any_chosen |= trajectories.chosen.has(row);
  }
  if (any_chosen) return;
  throw InputError(fmt::format("objective kto expects `chosen`; received none in {} trajectories",
                               trajectories.num_rows()));
}

}  // namespace

Loss::Loss(const Trajectories& trajectories, std::shared_ptr<const Objective> objective)
    : trajectories_(&trajectories), objective_(std::move(objective)) {
  if (objective_->reads(TermColumn::kAdvantage)) {
    advantages_ = Advantages(trajectories, objective_->options());
  }
  if (objective_->is_at_row_temperature()) logit_temperatures_ = temperatures_of(trajectories);
  if (objective_->scope() == Scope::kPair) check_pairs(trajectories);
  if (objective_->options().kind == ObjectiveKind::kKto) check_kto_rows(trajectories);
  if (objective_->reads(TermColumn::kRefLogprob)) check_rows_have(trajectories.ref_logprobs, "ref_logprobs");
  if (objective_->reads_topk()) check_ref_topk();
  const bool weighs = objective_->options().importance_weights != ImportanceWeights::kNone;
  if (weighs && objective_->reads(TermColumn::kOldLogprob)) {
    ESPALIER_CHECK(trajectories.logprobs.any(),
                   "objective {} with importance-weights {} expects `logprobs`; received none in {} "
                   "trajectories",
                   objective_->name(), to_string(objective_->options().importance_weights),
                   trajectories.num_rows());
  }
}

Loss::Loss(const Trajectories& trajectories, std::span<const MixSource> sources)
    : trajectories_(&trajectories) {
  check_mix(sources);
  int64_t row = 0;
  for (const MixSource& source : sources) {
    const auto rows =
        std::make_shared<const Trajectories>(slice_rows(trajectories, row, row + source.num_rows));
    try {
      parts_.push_back(
          {source.name, source.weight, row, rows, std::make_shared<const Loss>(*rows, source.objective)});
    } catch (const InputError& error) {
      throw InputError(fmt::format("source {}: {}", source.name, error.what()));
    }
    row += source.num_rows;
  }
  ESPALIER_ASSERT(row == trajectories.num_rows());
}

Loss Loss::at_row_temperatures(const Trajectories& trajectories) {
  Loss loss(trajectories, ObjectiveOptions{});
  loss.logit_temperatures_ = temperatures_of(trajectories);
  return loss;
}

double Loss::logit_temperature(int64_t row) const {
  if (is_mix()) return part(part_of(row)).logit_temperature(row - first_row(part_of(row)));
  return logit_temperatures_.empty() ? 1 : logit_temperatures_[row];
}

bool Loss::divides_logits() const {
  if (!is_mix()) return !logit_temperatures_.empty();
  return std::ranges::any_of(parts_, [](const Part& part) { return part.loss->divides_logits(); });
}

Loss Loss::of_tokens() const {
  Loss tokens(*trajectories_, ObjectiveOptions{});
  if (!divides_logits()) return tokens;
  for (int64_t row = 0; row < trajectories_->num_rows(); ++row) {
    tokens.logit_temperatures_.push_back(logit_temperature(row));
  }
  return tokens;
}

Loss make_loss(const Trajectories& trajectories, const ObjectiveOptions& objective,
               std::span<const MixSource> mix) {
  return mix.empty() ? Loss(trajectories, objective) : Loss(trajectories, mix);
}

const Objective& Loss::objective() const {
  ESPALIER_ASSERT(objective_ != nullptr);
  return *objective_;
}

int64_t Loss::part_of(int64_t row) const {
  int64_t part = num_parts() - 1;
  while (first_row(part) > row) --part;
  return part;
}

bool Loss::is_wide() const {
  if (!is_mix()) return objective().scope() != Scope::kToken;
  return std::ranges::any_of(parts_, [](const Part& part) { return part.loss->is_wide(); });
}

const ObjectiveOptions& Loss::router_options() const {
  static const ObjectiveOptions none;
  return is_mix() ? none : objective().options();
}

std::vector<TermColumn> Loss::columns() const {
  if (!is_mix()) return objective().columns();
  std::vector<TermColumn> columns;
  for (const Part& part : parts_) {
    for (const TermColumn column : part.loss->columns()) {
      if (std::ranges::find(columns, column) == columns.end()) columns.push_back(column);
    }
  }
  return columns;
}

bool Loss::reads_topk() const {
  if (!is_mix()) return objective().reads_topk();
  return std::ranges::any_of(parts_, [](const Part& part) { return part.loss->reads_topk(); });
}

TermTensors Loss::terms_of_part(int64_t part, const TermTensors& terms, const at::Tensor& index) const {
  if (!index.defined()) return terms;
  const auto select = [&](const at::Tensor& values) { return values.index_select(0, index); };
  TermTensors result{select(terms.coefficient), {}};
  const std::vector<TermColumn> all = columns();
  for (const TermColumn column : this->part(part).columns()) {
    result.columns.push_back(select(terms.columns[std::ranges::find(all, column) - all.begin()]));
  }
  if (!this->part(part).reads_topk()) return result;
  if (terms.topk_logprobs.defined()) result.topk_logprobs = select(terms.topk_logprobs);
  result.topk_ref_logprobs = select(terms.topk_ref_logprobs);
  return result;
}

void Loss::check_ref_topk() const {
  const Trajectories& t = *trajectories_;
  for (int64_t row = 0; row < t.num_rows(); ++row) {
    for (int64_t i = t.offsets[row] + 1; i < t.offsets[row + 1]; ++i) {
      if (t.loss_weights[i] == 0) continue;
      ESPALIER_CHECK(t.ref_topk > 0 && t.ref_topk_ids[i * t.ref_topk] >= 0,
                     "trajectory {} (row {}): objective {} with ref-topk {} expects `ref_topk_ids` and "
                     "`ref_topk_logprobs` for every token with loss; received none for token {}",
                     t.name(row), row, objective_->name(), to_string(objective_->options().ref_topk),
                     i - t.offsets[row]);
    }
  }
}

void Loss::check_rows_have(const Optional<RealColumn>& column, const char* field) const {
  for (int64_t row = 0; row < trajectories_->num_rows(); ++row) {
    ESPALIER_CHECK(column.has(row), "trajectory {} (row {}): objective {} expects `{}`; received none",
                   trajectories_->name(row), row, objective_->name(), field);
  }
}

double Loss::column(TermColumn column, int64_t row, int64_t position) const {
  if (is_mix()) {
    const int64_t i = part_of(row);
    return part(i).objective().reads(column) ? part(i).column(column, row - first_row(i), position)
                                             : std::numeric_limits<double>::quiet_NaN();
  }
  switch (column) {
    case TermColumn::kAdvantage:
      return advantages_.at(row, position);
    case TermColumn::kOldLogprob:
      return trajectories_->logprobs.has(row)
                 ? trajectories_->logprobs.values[trajectories_->offsets[row] + position]
                 : std::numeric_limits<double>::quiet_NaN();
    case TermColumn::kRefLogprob:
      return trajectories_->ref_logprobs.values[trajectories_->offsets[row] + position];
    case TermColumn::kWeight:
      return trajectories_->loss_weights[trajectories_->offsets[row] + position];
    case TermColumn::kChosen:
      return trajectories_->chosen.has(row) ? static_cast<double>(trajectories_->chosen.values[row]) : -1;
  }
  throw InternalError("unknown column");
}

std::vector<int64_t> Loss::units_of_mix(const std::vector<int64_t>& rows) const {
  std::vector<std::vector<int64_t>> rows_of_part(num_parts());
  for (const int64_t row : rows) rows_of_part[part_of(row)].push_back(row - first_row(part_of(row)));
  std::vector<std::vector<int64_t>> units_of_part;
  for (int64_t i = 0; i < num_parts(); ++i) units_of_part.push_back(part(i).units_of(rows_of_part[i]));
  std::map<std::pair<int64_t, int64_t>, int64_t> known;  // by part and unit of the part
  std::vector<size_t> next(num_parts());
  std::vector<int64_t> units;
  for (const int64_t row : rows) {
    const int64_t i = part_of(row), unit = units_of_part[i][next[i]++];
    units.push_back(known.try_emplace({i, unit}, static_cast<int64_t>(known.size())).first->second);
  }
  return units;
}

std::vector<int64_t> Loss::units_of(const std::vector<int64_t>& rows) const {
  if (is_mix()) return units_of_mix(rows);
  const Scope scope = objective_->scope();
  if (scope == Scope::kStep) return std::vector<int64_t>(rows.size());
  static const std::vector<std::string> none;
  const std::vector<std::string>& names = scope == Scope::kGroup  ? trajectories_->group_id
                                          : scope == Scope::kPair ? trajectories_->pair_id
                                                                  : none;
  std::unordered_map<std::string, int64_t> known;
  std::vector<int64_t> units;
  int64_t next = 0;
  for (const int64_t row : rows) {
    if (names.empty() || names[row].empty()) {
      units.push_back(next++);
      continue;
    }
    const auto [entry, is_new] = known.try_emplace(names[row], next);
    next += is_new;
    units.push_back(entry->second);
  }
  return units;
}

}  // namespace espalier
