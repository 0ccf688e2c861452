// SPDX-License-Identifier: Apache-2.0
// Building Trajectories row by row, or from sets of rows.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/data/growing.h"
#include "espalier/data/trajectories.h"

namespace espalier {

/// One trajectory that owns its arrays. An empty array, empty string or nullopt: the row lacks the field.
struct TrajectoryRow {
  std::vector<int32_t> input_ids;  // [n], n >= 1, ids >= 0

  // At most one of the two; with neither every weight is 1.
  std::vector<uint8_t> loss_mask;    // [n] of 0/1
  std::vector<double> loss_weights;  // [n] finite, >= 0

  // [n] entry 0 is 0. NaN: a token without loss has none, for which columns hold 0.
  std::vector<double> logprobs;
  std::vector<double> ref_logprobs;

  // At most one of the two.
  std::vector<double> advantages;   // [n] finite
  std::optional<double> advantage;  // the same for all n tokens

  // At most one of the two.
  std::optional<double> reward;
  std::vector<double> turn_rewards;  // [turns] finite; a turn is a maximal range of tokens with loss

  // Both or neither; ref_topk is their length over n. A token without reference tokens has -1 and 0 in all
  // its entries.
  std::vector<int32_t> ref_topk_ids;      // [n * ref_topk] distinct for each token
  std::vector<double> ref_topk_logprobs;  // [n * ref_topk]

  std::optional<bool> chosen;
  std::string trajectory_id;
  std::string group_id;
  std::string pair_id;

  std::vector<int32_t> routed_experts;  // [n * routes_per_token]

  // How the tokens with loss were sampled (Trajectories).
  std::optional<double> temperature, top_k, top_p;

  void clear();  ///< empties the row, but keeps the memory of the arrays

  /// Whether a token carries loss, which the first never does.
  bool carries_loss(size_t token) const {
    if (token == 0) return false;
    if (token < loss_weights.size()) return loss_weights[token] > 0;
    return token >= loss_mask.size() || loss_mask[token] != 0;
  }
};

/// In the order of kRowReals.
inline constexpr std::array<std::optional<double> TrajectoryRow::*, kRowReals.size()> kRealsOfRow{
    &TrajectoryRow::reward, &TrajectoryRow::temperature, &TrajectoryRow::top_k, &TrajectoryRow::top_p};

/// In the order of kRowTexts.
inline constexpr std::array<std::string TrajectoryRow::*, kRowTexts.size()> kTextsOfRow{
    &TrajectoryRow::trajectory_id, &TrajectoryRow::group_id, &TrajectoryRow::pair_id};

/// Visits the fields that a row has, in the order of files: visitor.add(name, value) for a text, bool, double
/// or vector; add_logprobs(name, values); and add_table(name, values, has) for equally many values of each
/// token, where has(i) tells whether the token whose values begin at i has any. `Row`: TrajectoryRow, which
/// may be const.
template <class Row, class Visitor>
void visit_fields(Row& row, Visitor& visitor) {
  const auto add = [&](const char* name, auto& values) {
    if (!values.empty()) visitor.add(name, values);
  };
  for (size_t i = 0; i < kRowTexts.size(); ++i) add(kRowTexts[i].name, row.*kTextsOfRow[i]);
  if (row.chosen) visitor.add("chosen", *row.chosen);
  for (size_t i = 0; i < kRowReals.size(); ++i) {
    if (const auto& value = row.*kRealsOfRow[i]) visitor.add(kRowReals[i].name, *value);
  }
  add("turn_rewards", row.turn_rewards);
  if (row.advantage) visitor.add("advantage", *row.advantage);
  visitor.add("input_ids", row.input_ids);
  add("loss_mask", row.loss_mask);
  add("loss_weights", row.loss_weights);
  if (!row.logprobs.empty()) visitor.add_logprobs("logprobs", row.logprobs);
  if (!row.ref_logprobs.empty()) visitor.add_logprobs("ref_logprobs", row.ref_logprobs);
  add("advantages", row.advantages);
  if (!row.ref_topk_ids.empty()) {
    const auto has = [&ids = row.ref_topk_ids](size_t first) { return ids[first] >= 0; };
    visitor.add_table("ref_topk_ids", row.ref_topk_ids, has);
    visitor.add_table("ref_topk_logprobs", row.ref_topk_logprobs, has);
  }
  if (!row.routed_experts.empty())
    visitor.add_table("routed_experts", row.routed_experts, [](size_t) { return true; });
}

/// Throws InputError "field `F`: expected E, received R" unless the row keeps the rules above and its ids are
/// below vocab_size (0: any).
void check_row(const TrajectoryRow& row, int64_t vocab_size = 0);

/// check_logprobs for a field of the row, which may be NaN for tokens without loss.
void check_row_logprobs(std::string_view field, const std::vector<double>& logprobs,
                        const TrajectoryRow& row);

/// A copy of row r. Reals become doubles. `advantage` is never set, because columns hold only `advantages`.
TrajectoryRow copy_row(const Trajectories& trajectories, int64_t r);

/// Collects rows, and sets of rows, into columns. If a row is refused, the columns stay unchanged. A column
/// of reals keeps its type if all parts have the same (masks stay bytes, floats stay floats); else it becomes
/// doubles.
class TrajectoriesBuilder {
 public:
  /// With a store, the columns are written to temporary files once they take more memory than they may. Then
  /// appending and finish() throw InputError if that fails, and finish() returns mapped columns, whose files
  /// have no names any more.
  explicit TrajectoriesBuilder(RowStore store = {});
  ~TrajectoriesBuilder();
  TrajectoriesBuilder(TrajectoriesBuilder&&) noexcept;

  /// check_row, and checks that routes_per_token and ref_topk equal those of the rows before.
  void check(const TrajectoryRow& row, int64_t vocab_size = 0) const;
  /// Appends a row that was checked.
  void append_checked(const TrajectoryRow& row);
  void append(const TrajectoryRow& row, int64_t vocab_size = 0) {
    check(row, vocab_size);
    append_checked(row);
  }

  /// The rows from now on are of the file `name` (Trajectories::sources).
  void begin_source(const std::string& name);
  /// Appends the rows of the file `name`. Throws InputError "NAME: field `F`: ..." if their number of routes
  /// or reference tokens per token differs from that of the rows before.
  void append(const Trajectories& part, const std::string& name);

  int64_t num_rows() const;

  /// Moves the columns out; the builder is empty afterwards, and has no store.
  Trajectories finish();

 private:
  struct Columns;
  std::unique_ptr<Columns> columns_;
};

}  // namespace espalier
