// SPDX-License-Identifier: Apache-2.0
// Building Trajectories row by row.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "espalier/data/trajectories.h"

namespace espalier {

/// One trajectory that owns its arrays. An empty array, empty string or nullopt: the row lacks the field.
struct TrajectoryRow {
  std::vector<int32_t> input_ids;  // [n], n >= 1, ids >= 0

  // At most one of the two; with neither every weight is 1.
  std::vector<uint8_t> loss_mask;    // [n] of 0/1
  std::vector<double> loss_weights;  // [n] finite, >= 0

  std::vector<double> logprobs;      // [n] entry 0 is 0
  std::vector<double> ref_logprobs;  // [n] entry 0 is 0

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

  void clear();  ///< empties the row, but keeps the memory of the arrays
};

/// Throws InputError "field `F`: expected E, received R" unless the row keeps the rules above and its ids are
/// below vocab_size (0: any).
void check_row(const TrajectoryRow& row, int64_t vocab_size = 0);

/// A copy of row r. Reals become doubles. `advantage` is never set, because columns hold only `advantages`.
TrajectoryRow copy_row(const Trajectories& trajectories, int64_t r);

/// Collects rows into columns. If a row is refused, the columns stay unchanged.
class TrajectoriesBuilder {
 public:
  /// Checks the row (check_row, and that routes_per_token and ref_topk equal those of the rows before) and
  /// appends it.
  void append(const TrajectoryRow& row, int64_t vocab_size = 0);

  int64_t num_rows() const { return static_cast<int64_t>(offsets_.size()) - 1; }

  /// Moves the columns out; the builder is empty afterwards.
  Trajectories finish();

 private:
  /// A column that grows row by row. It uses no memory before the first row that has it.
  template <typename T>
  struct GrowingColumn {
    std::vector<T> values;
    std::vector<uint8_t> present;  // [rows]
    bool any = false;

    /// `size_before`: the number of values of the rows before this one.
    void append(std::span<const T> row, size_t size_before);
    void append_absent(size_t count);
    template <typename Values>
    Optional<Values> finish();
  };

  void append_weights(const TrajectoryRow& row);
  void append_advantages(const TrajectoryRow& row, size_t tokens_before);
  void append_text(std::vector<std::string>& column, const std::string& text);
  void append_routes(const TrajectoryRow& row, size_t tokens_before);
  void append_turn_rewards(const TrajectoryRow& row);
  void append_ref_topk(const TrajectoryRow& row, size_t tokens_before);

  std::vector<int64_t> offsets_{0};
  std::vector<int32_t> input_ids_;
  std::vector<uint8_t> loss_mask_;    // used until a row has loss_weights
  std::vector<double> loss_weights_;  // used from then on
  bool has_weights_ = false;
  GrowingColumn<double> logprobs_, ref_logprobs_, advantages_, reward_;
  GrowingColumn<uint8_t> chosen_;
  std::vector<std::string> trajectory_id_, group_id_, pair_id_;
  std::vector<int32_t> routed_experts_;
  int64_t routes_per_token_ = 0;
  std::vector<int64_t> turn_reward_offsets_{0};
  std::vector<double> turn_rewards_;
  std::vector<int32_t> ref_topk_ids_;
  std::vector<double> ref_topk_logprobs_;
  int64_t ref_topk_ = 0;
};

}  // namespace espalier
