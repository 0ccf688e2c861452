// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/pairs.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "espalier/base/check.h"

namespace espalier {
namespace {

bool has_loss(const Trajectories& trajectories, int64_t row) {
  for (int64_t i = trajectories.offsets[row] + 1; i < trajectories.offsets[row + 1]; ++i) {
    if (trajectories.loss_weights[i] > 0) return true;
  }
  return false;
}

}  // namespace

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
    ESPALIER_CHECK(has_loss(trajectories, row),
                   "trajectory {} (row {}): a preference expects tokens with loss; received none",
                   trajectories.name(row), row);
    place = row;
  }
  for (const auto& [name, pair] : pairs) {
    for (const int side : {0, 1}) {
      ESPALIER_CHECK(pair.rows[side] >= 0,
                     "pair {}: expected a chosen and a rejected trajectory, received row {} alone, which is "
                     "{} (--limit may have cut the other one off)",
                     name, pair.rows[1 - side], side == 0 ? "chosen" : "rejected");
    }
  }
}

void check_some_chosen(const Trajectories& trajectories) {
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (trajectories.chosen.has(row)) return;
  }
  throw InputError(fmt::format("objective kto expects `chosen`; received none in {} trajectories",
                               trajectories.num_rows()));
}

}  // namespace espalier
