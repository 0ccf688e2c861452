// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/slice.h"

#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace espalier {
namespace {

template <typename T>
Column<T> slice(const Column<T>& column, int64_t begin, int64_t end) {
  if (column.empty()) return {};
  return {column.span().subspan(begin, end - begin), std::make_shared<const Column<T>>(column)};
}

RealColumn slice(const RealColumn& column, int64_t begin, int64_t end) {
  return std::visit([&](const auto& values) { return RealColumn(slice(values, begin, end)); },
                    column.values());
}

/// Rows [begin, end) of a column, whose values are [first, last).
template <typename Values>
Optional<Values> slice(const Optional<Values>& column, int64_t first, int64_t last, int64_t begin,
                       int64_t end) {
  return {slice(column.values, first, last), slice(column.present, begin, end)};
}

std::vector<std::string> slice(const std::vector<std::string>& texts, int64_t begin, int64_t end) {
  if (texts.empty()) return {};
  return {texts.begin() + begin, texts.begin() + end};
}

Column<int64_t> slice_offsets(const Column<int64_t>& offsets, int64_t begin, int64_t end) {
  std::vector<int64_t> result;
  for (int64_t row = begin; row <= end; ++row) result.push_back(offsets[row] - offsets[begin]);
  return result;
}

}  // namespace

Trajectories slice_rows(const Trajectories& t, int64_t begin, int64_t end) {
  const int64_t first = t.offsets[begin], last = t.offsets[end];
  Trajectories result;
  result.offsets = slice_offsets(t.offsets, begin, end);
  result.input_ids = slice(t.input_ids, first, last);
  result.loss_weights = slice(t.loss_weights, first, last);
  result.logprobs = slice(t.logprobs, first, last, begin, end);
  result.ref_logprobs = slice(t.ref_logprobs, first, last, begin, end);
  result.advantages = slice(t.advantages, first, last, begin, end);
  result.reward = slice(t.reward, begin, end, begin, end);
  result.chosen = slice(t.chosen, begin, end, begin, end);
  result.trajectory_id = slice(t.trajectory_id, begin, end);
  result.group_id = slice(t.group_id, begin, end);
  result.pair_id = slice(t.pair_id, begin, end);
  if (!t.turn_reward_offsets.empty()) {
    result.turn_rewards = slice(t.turn_rewards, t.turn_reward_offsets[begin], t.turn_reward_offsets[end]);
    result.turn_reward_offsets = slice_offsets(t.turn_reward_offsets, begin, end);
  }
  result.ref_topk = t.ref_topk;
  result.ref_topk_ids = slice(t.ref_topk_ids, first * t.ref_topk, last * t.ref_topk);
  result.ref_topk_logprobs = slice(t.ref_topk_logprobs, first * t.ref_topk, last * t.ref_topk);
  result.routes_per_token = t.routes_per_token;
  result.routed_experts = slice(t.routed_experts, first * t.routes_per_token, last * t.routes_per_token);
  for (const RowSource& source : t.sources) result.sources.push_back({source.name, source.first_row - begin});
  result.release = t.release;
  return result;
}

}  // namespace espalier
