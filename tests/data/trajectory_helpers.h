// SPDX-License-Identifier: Apache-2.0
// Random trajectories and their comparison.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "espalier/base/rng.h"
#include "espalier/data/builder.h"
#include "espalier/data/row_checks.h"
#include "espalier/data/trajectories.h"

namespace espalier::testing {

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// Reals of very different sizes, some of them exact floats.
inline double random_real(Rng& rng) {
  const double value = rng.normal() * std::pow(10.0, static_cast<double>(rng.between(-12, 12)));
  return rng.below(2) == 0 ? static_cast<double>(static_cast<float>(value)) : value;
}

inline std::string random_text(Rng& rng) {
  static const std::vector<std::string> pieces = {"a",  "7",  " ", "\"",   "\\",
                                                  "\n", "\t", "é", "日本", std::string(1, '\0')};
  std::string text;
  for (int64_t i = rng.below(6); i > 0; --i) text += pieces[rng.below(static_cast<int64_t>(pieces.size()))];
  return text;
}

/// Which columns a random set has: 0 in no row, 1 in about half of the rows, 2 in all.
struct RandomShape {
  explicit RandomShape(Rng& rng) {
    for (int64_t* column : {&weights, &mask, &logprobs, &ref_logprobs, &advantages, &reward, &chosen, &ids,
                            &routes, &topk, &choice})
      *column = rng.below(3);
    routes_per_token = rng.between(1, 4);
    ref_topk = rng.between(1, 3);
  }
  int64_t weights, mask, logprobs, ref_logprobs, advantages, reward, chosen, ids, routes, topk, choice;
  int64_t routes_per_token, ref_topk;
};

/// Tokens of a reference for all tokens of the row but the first and some others.
inline void add_random_ref_topk(Rng& rng, int64_t ref_topk, TrajectoryRow* row) {
  for (size_t token = 0; token < row->input_ids.size(); ++token) {
    const bool none = token == 0 || rng.below(4) == 0;
    const auto first = static_cast<int32_t>(rng.below(50));
    for (int32_t k = 0; k < ref_topk; ++k) {
      row->ref_topk_ids.push_back(none ? -1 : (first + 7 * k) % 50);
      row->ref_topk_logprobs.push_back(none ? 0 : -std::abs(random_real(rng)));
    }
  }
  const bool any =
      std::any_of(row->ref_topk_ids.begin(), row->ref_topk_ids.end(), [](int32_t id) { return id >= 0; });
  if (any) return;  // a row that has none in any token has none
  row->ref_topk_ids.clear();
  row->ref_topk_logprobs.clear();
}

inline TrajectoryRow random_row(Rng& rng, const RandomShape& shape) {
  const auto has = [&rng](int64_t column) { return column == 2 || (column == 1 && rng.below(2) == 0); };
  const int64_t size = rng.between(1, 12);
  const auto reals = [&](auto value) {
    std::vector<double> values;
    for (int64_t i = 0; i < size; ++i) values.push_back(value(i));
    return values;
  };
  const auto logprob = [&rng](int64_t i) { return i == 0 ? 0.0 : -std::abs(random_real(rng)); };
  TrajectoryRow row;
  for (int64_t i = 0; i < size; ++i)
    row.input_ids.push_back(
        static_cast<int32_t>(rng.below(2) == 0 ? rng.below(100) : rng.below(int64_t{1} << 31)));
  if (has(shape.weights)) {
    row.loss_weights = reals([&](int64_t) { return std::abs(random_real(rng)); });
  } else if (has(shape.mask)) {
    for (int64_t i = 0; i < size; ++i) row.loss_mask.push_back(static_cast<uint8_t>(rng.below(2)));
  }
  if (has(shape.logprobs)) row.logprobs = reals(logprob);
  if (has(shape.ref_logprobs)) row.ref_logprobs = reals(logprob);
  if (has(shape.advantages)) {
    if (rng.below(2) == 0) {
      row.advantage = random_real(rng);
    } else {
      row.advantages = reals([&](int64_t) { return random_real(rng); });
    }
  }
  if (has(shape.reward) && rng.below(2) == 0) {
    row.reward = random_real(rng);
  } else if (has(shape.reward)) {
    std::vector<double> weights = row.loss_weights;
    if (weights.empty()) weights.assign(row.loss_mask.begin(), row.loss_mask.end());
    if (weights.empty()) weights.assign(row.input_ids.size(), 1);
    for (int64_t turns = count_turns(std::span<const double>(weights)); turns > 0; --turns)
      row.turn_rewards.push_back(random_real(rng));
  }
  if (has(shape.topk)) add_random_ref_topk(rng, shape.ref_topk, &row);
  if (has(shape.chosen)) row.chosen = rng.below(2) == 0;
  if (has(shape.choice)) row.temperature = rng.below(4) == 0 ? 0 : 2 * rng.uniform();
  if (has(shape.choice)) row.top_k = static_cast<double>(rng.between(-1, 50));
  if (has(shape.choice)) row.top_p = 1 - rng.uniform();
  if (has(shape.ids)) row.trajectory_id = random_text(rng);
  if (has(shape.ids)) row.group_id = random_text(rng);
  if (has(shape.ids)) row.pair_id = random_text(rng);
  if (has(shape.routes)) {
    for (int64_t i = 0; i < size * shape.routes_per_token; ++i)
      row.routed_experts.push_back(static_cast<int32_t>(rng.below(128)));
  }
  return row;
}

inline Trajectories random_trajectories(Rng& rng) {
  const RandomShape shape(rng);
  TrajectoriesBuilder builder;
  for (int64_t rows = rng.between(1, 20); rows > 0; --rows) builder.append(random_row(rng, shape));
  return builder.finish();
}

template <typename T>
std::vector<T> values_of(const Column<T>& column) {
  return {column.span().begin(), column.span().end()};
}

inline std::vector<double> values_of(const RealColumn& column) {
  std::vector<double> values;
  for (int64_t i = 0; i < column.size(); ++i) values.push_back(column[i]);
  return values;
}

/// Whether two optional columns are equal in each of `rows` rows. A column that no row has may be empty or
/// full of absent entries.
template <typename Values>
bool same_optional(const Optional<Values>& a, const Optional<Values>& b, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    if (a.has(r) != b.has(r)) return false;
  }
  return values_of(a.values) == values_of(b.values);
}

/// Texts that are all empty are the same as none.
inline bool same_texts(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  const auto all_empty = [](const std::vector<std::string>& texts) {
    return std::all_of(texts.begin(), texts.end(), [](const std::string& text) { return text.empty(); });
  };
  return a == b || (all_empty(a) && all_empty(b));
}

/// The columns that differ, "" when none does.
inline std::string differences(const Trajectories& a, const Trajectories& b) {
  std::string names;
  const auto note = [&names](bool same, const char* name) {
    if (!same) names += std::string(names.empty() ? "" : ", ") + name;
  };
  note(values_of(a.offsets) == values_of(b.offsets), "offsets");
  if (!names.empty()) return names;
  const int64_t rows = a.num_rows();
  note(values_of(a.input_ids) == values_of(b.input_ids), "input_ids");
  note(values_of(a.loss_weights) == values_of(b.loss_weights), "loss_weights");
  note(same_optional(a.logprobs, b.logprobs, rows), "logprobs");
  note(same_optional(a.ref_logprobs, b.ref_logprobs, rows), "ref_logprobs");
  note(same_optional(a.advantages, b.advantages, rows), "advantages");
  for (const RowReal& real : kRowReals) note(same_optional(a.*real.column, b.*real.column, rows), real.name);
  note(values_of(a.turn_reward_offsets) == values_of(b.turn_reward_offsets) &&
           values_of(a.turn_rewards) == values_of(b.turn_rewards),
       "turn_rewards");
  note(a.ref_topk == b.ref_topk && values_of(a.ref_topk_ids) == values_of(b.ref_topk_ids), "ref_topk_ids");
  note(values_of(a.ref_topk_logprobs) == values_of(b.ref_topk_logprobs), "ref_topk_logprobs");
  note(same_optional(a.chosen, b.chosen, rows), "chosen");
  note(same_texts(a.trajectory_id, b.trajectory_id), "trajectory_id");
  note(same_texts(a.group_id, b.group_id), "group_id");
  note(same_texts(a.pair_id, b.pair_id), "pair_id");
  note(a.routes_per_token == b.routes_per_token, "routes_per_token");
  note(values_of(a.routed_experts) == values_of(b.routed_experts), "routed_experts");
  return names;
}

}  // namespace espalier::testing
