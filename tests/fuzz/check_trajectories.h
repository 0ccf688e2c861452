// SPDX-License-Identifier: Apache-2.0
// What must hold for trajectories that a reader let through.
#pragma once

#include <algorithm>

#include "espalier/data/reader.h"
#include "espalier/data/trajectories.h"
#include "tests/fuzz/input_file.h"

namespace espalier::fuzz {

template <typename Values>
void require_size(const Optional<Values>& column, int64_t size, int64_t num_rows) {
  require(!column.any() || column.values.size() == size);
  require(column.present.empty() || column.present.size() == num_rows);
}

inline void check_trajectories(const Trajectories& t, const ReadOptions& options) {
  const int64_t rows = t.num_rows(), tokens = t.num_tokens();
  require(rows > 0 && t.offsets[0] == 0 && t.offsets[rows] == tokens);
  for (int64_t r = 0; r < rows; ++r) {
    require(t.row_size(r) > 0);
    for (const int32_t id : t.row(r)) {
      require(id >= 0 && (options.vocab_size == 0 || id < options.vocab_size));
    }
  }
  require(t.loss_weights.size() == tokens);
  require_size(t.logprobs, tokens, rows);
  require_size(t.ref_logprobs, tokens, rows);
  require_size(t.advantages, tokens, rows);
  require_size(t.reward, rows, rows);
  require_size(t.chosen, rows, rows);
  for (const auto* names : {&t.trajectory_id, &t.group_id, &t.pair_id}) {
    require(names->empty() || static_cast<int64_t>(names->size()) == rows);
  }
  require(t.routed_experts.size() == tokens * t.routes_per_token);
  require(t.ref_topk_ids.size() == tokens * t.ref_topk);
  require(t.ref_topk_logprobs.size() == tokens * t.ref_topk);
  require(t.turn_reward_offsets.empty() ? t.turn_rewards.empty()
                                        : t.turn_reward_offsets.size() == rows + 1 &&
                                              t.turn_reward_offsets[rows] == t.turn_rewards.size());
  content_hashes(t);  // reads every value of every column
}

}  // namespace espalier::fuzz
