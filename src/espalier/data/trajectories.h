// SPDX-License-Identifier: Apache-2.0
// A set of trajectories in columns (docs/data-format.md), owned or memory-mapped.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "espalier/base/csr.h"

namespace espalier {

/// A column of plain values that is either owned (from JSONL) or a view of a mapped file (packed form).
template <typename T>
class Column {
 public:
  Column() = default;
  Column(std::vector<T> values)
      : owned_(std::make_shared<const std::vector<T>>(std::move(values))), view_(*owned_) {}
  Column(std::span<const T> view, std::shared_ptr<const void> keep_alive)
      : keep_alive_(std::move(keep_alive)), view_(view) {}

  std::span<const T> span() const { return view_; }
  int64_t size() const { return static_cast<int64_t>(view_.size()); }
  bool empty() const { return view_.empty(); }
  const T& operator[](int64_t i) const { return view_[i]; }

 private:
  std::shared_ptr<const std::vector<T>> owned_;
  std::shared_ptr<const void> keep_alive_;
  std::span<const T> view_;
};

/// Real numbers stored in the precision of the file and read as double. JSONL gives doubles, so that no
/// number is rounded. Masks are bytes.
class RealColumn {
 public:
  RealColumn() = default;
  RealColumn(Column<double> values) : values_(std::move(values)) {}
  RealColumn(Column<float> values) : values_(std::move(values)) {}
  RealColumn(Column<uint8_t> values) : values_(std::move(values)) {}

  double operator[](int64_t i) const {
    return std::visit([i](const auto& column) { return static_cast<double>(column[i]); }, values_);
  }
  int64_t size() const {
    return std::visit([](const auto& column) { return column.size(); }, values_);
  }
  bool empty() const { return size() == 0; }
  const std::variant<Column<double>, Column<float>, Column<uint8_t>>& values() const { return values_; }

 private:
  std::variant<Column<double>, Column<float>, Column<uint8_t>> values_;
};

/// A column that rows may lack. `values` is empty if no row has it; otherwise it has an entry for every token
/// (or row), 0 where absent. `present` is empty if every row has it, else [num_rows] of 0/1.
template <typename Values>
struct Optional {
  Values values;
  Column<uint8_t> present;

  bool any() const { return !values.empty(); }
  bool has(int64_t row) const { return any() && (present.empty() || present[row] != 0); }
};

/// The file of the rows from first_row up to the next source's first_row.
struct RowSource {
  std::string name;
  int64_t first_row = 0;
};

/// One row per trajectory. Token columns are aligned to input_ids: row r owns [offsets[r], offsets[r + 1]).
struct Trajectories {
  Column<int64_t> offsets;    // [R + 1]
  Column<int32_t> input_ids;  // [N]
  RealColumn loss_weights;    // [N] finite, >= 0; bytes for a loss_mask; 1 where the row has neither

  Optional<RealColumn> logprobs;  // [N] behaviour policy; entry t is log p(token t | before), entry 0 is 0
  Optional<RealColumn> ref_logprobs;  // [N]
  Optional<RealColumn> advantages;    // [N] one per token; a scalar `advantage` is spread over its row
  Optional<RealColumn> reward;        // [R]
  Optional<RealColumn> temperature;   // [R] >= 0; see logit_temperature
  Optional<RealColumn> top_k;         // [R] whole, >= -1: the policy chose among so many; below 1: among all
  Optional<RealColumn> top_p;         // [R] above 0, at most 1: among the fewest with this probability
  Optional<Column<uint8_t>> chosen;   // [R] 0/1

  // Strings are empty where a row lacks them. Numbers in the file become their decimal text.
  std::vector<std::string> trajectory_id;  // [R] or empty
  std::vector<std::string> group_id;       // [R] or empty
  std::vector<std::string> pair_id;        // [R] or empty

  // One reward per turn (turn_starts): row r owns [turn_reward_offsets[r], turn_reward_offsets[r + 1]). Both
  // are empty if no row has any.
  Column<int64_t> turn_reward_offsets;  // [R + 1]
  RealColumn turn_rewards;              // finite

  // The reference model's ref_topk most likely tokens at each position and their log-probabilities given the
  // tokens before it. Positions that have none, such as the first of every row, hold id -1 and 0.
  Column<int32_t> ref_topk_ids;  // [N * ref_topk]
  RealColumn ref_topk_logprobs;  // [N * ref_topk]
  int64_t ref_topk = 0;

  // The token that a term predicts in place of token t: entry t takes the place of token t as what the tokens
  // before it predict, while those after it still read token t. Columns of Python alone have it.
  Column<int32_t> target_ids;  // [N] or empty

  // Recorded expert routes: routes_per_token ids for every token ([layers, experts per token], flattened), or
  // empty. Rows without routes hold -1.
  Column<int32_t> routed_experts;  // [N * routes_per_token]
  int64_t routes_per_token = 0;

  std::vector<RowSource> sources;  // ascending; empty if all rows are from one file

  /// Releases the pages of a mapped file from this process, for TokenSequences::release. Empty if all columns
  /// are owned.
  std::function<void()> release;

  int64_t num_rows() const { return offsets.empty() ? 0 : offsets.size() - 1; }
  int64_t num_tokens() const { return input_ids.size(); }
  int64_t row_size(int64_t r) const { return offsets[r + 1] - offsets[r]; }
  std::span<const int32_t> row(int64_t r) const { return input_ids.span().subspan(offsets[r], row_size(r)); }
  /// The token that a term predicts, by its flat index.
  int32_t target(int64_t flat) const { return target_ids.empty() ? input_ids[flat] : target_ids[flat]; }
  /// `logprobs` and `ref_logprobs` of row r are those of softmax(logits / this). A policy of temperature 0
  /// takes the most likely token; log-probabilities are then those of 1, as in rows without a temperature.
  double logit_temperature(int64_t r) const {
    const double value = temperature.has(r) ? temperature.values[r] : 1;
    return value > 0 ? value : 1;
  }
  bool has_turn_rewards(int64_t r) const {
    return !turn_reward_offsets.empty() && turn_reward_offsets[r + 1] > turn_reward_offsets[r];
  }
  /// The trajectory_id of row r, or its 0-based number (within its file if there are several).
  std::string name(int64_t r) const;
};

/// A column of one number for each row.
struct RowReal {
  const char* name;
  Optional<RealColumn> Trajectories::* column;
  const char* expected;
  bool (*is_good)(double value);  // of finite values
};
inline constexpr std::array<RowReal, 4> kRowReals{{
    {"reward", &Trajectories::reward, "a finite number", [](double) { return true; }},
    {"temperature", &Trajectories::temperature, "a number >= 0", [](double value) { return value >= 0; }},
    {"top_k", &Trajectories::top_k, "a whole number >= 0, or -1 (all)",
     [](double value) { return value >= -1 && value == std::floor(value); }},
    {"top_p", &Trajectories::top_p, "a number above 0 and at most 1",
     [](double value) { return value > 0 && value <= 1; }},
}};

/// The columns of one text for each row.
struct RowText {
  const char* name;
  std::vector<std::string> Trajectories::* column;
};
inline constexpr std::array<RowText, 3> kRowTexts{{{"trajectory_id", &Trajectories::trajectory_id},
                                                   {"group_id", &Trajectories::group_id},
                                                   {"pair_id", &Trajectories::pair_id}}};

/// The columns of one real number for each token, but for loss_weights.
struct TokenReal {
  const char* name;
  Optional<RealColumn> Trajectories::* column;
};
inline constexpr std::array<TokenReal, 3> kTokenReals{{{"logprobs", &Trajectories::logprobs},
                                                       {"ref_logprobs", &Trajectories::ref_logprobs},
                                                       {"advantages", &Trajectories::advantages}}};

/// First positions of the turns of row r: maximal ranges of tokens with loss. The first token of the row does
/// not count, because nothing predicts it.
std::vector<int64_t> turn_starts(const Trajectories& trajectories, int64_t r);

/// One 64-bit key per token for TokenSequences::merge_keys: tokens with different recorded routes have
/// different keys. Empty if no routes are recorded.
std::vector<uint64_t> route_keys(const Trajectories& trajectories);

/// Rows [begin, end) as views of the columns, which stay alive as long as the slice does.
Trajectories slice_rows(const Trajectories& trajectories, int64_t begin, int64_t end);

/// The hashes (base/hash.h) of the columns present, by their names in docs/data-format.md: input_ids (with
/// the rows' lengths), loss_weights, logprobs, ref_logprobs, advantages, reward, temperature, top_k, top_p,
/// chosen, group_id, pair_id, turn_rewards, ref_topk_ids, ref_topk_logprobs, routed_experts. JSON Lines and
/// packed files of equal values have equal hashes. trajectory_id is left out, because only messages use it.
std::map<std::string, std::string> content_hashes(const Trajectories& trajectories);

}  // namespace espalier
