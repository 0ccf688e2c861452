// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/trajectories.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "espalier/base/hash.h"

namespace espalier {
namespace {

/// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

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

/// Hashes columns of one set, of which it releases mapped pages.
struct ColumnHasher : Hasher {
  explicit ColumnHasher(const std::function<void()>& release) : release(release) {}

  template <typename T>
  void add_column(const Column<T>& column) {
    constexpr size_t kValues = size_t{1} << 24;
    for (auto rest = column.span(); !rest.empty(); rest = rest.subspan(std::min(kValues, rest.size()))) {
      add_values(rest.first(std::min(kValues, rest.size())));
      if (release) release();
    }
  }

  // Values are hashed as doubles, so that a byte mask equals weights of 0 and 1.
  void add_column(const RealColumn& column) {
    std::array<double, 4096> block{};
    for (int64_t begin = 0; begin < column.size(); begin += block.size()) {
      const auto count = std::min<int64_t>(block.size(), column.size() - begin);
      // Adding 0 turns -0 into 0, which compares equal.
      for (int64_t i = 0; i < count; ++i) block[i] = column[begin + i] + 0.0;
      add_values(std::span<const double>(block).first(count));
      if (release && begin % (int64_t{1} << 22) == 0) release();
    }
  }

  const std::function<void()>& release;
};

void add_strings(const char* name, const std::vector<std::string>& column,
                 std::map<std::string, std::string>* hashes) {
  const bool any = std::any_of(column.begin(), column.end(), [](const std::string& s) { return !s.empty(); });
  if (!any) return;
  Hasher hasher;
  for (const std::string& text : column) {
    const uint64_t size = text.size();
    hasher.add_values(std::span(&size, 1));
    hasher.add(std::as_bytes(std::span(text)));
  }
  (*hashes)[name] = hasher.digits();
}

}  // namespace

std::string Trajectories::name(int64_t r) const {
  if (!trajectory_id.empty() && !trajectory_id[r].empty()) return trajectory_id[r];
  if (sources.empty()) return std::to_string(r);
  const auto next =
      std::upper_bound(sources.begin(), sources.end(), r,
                       [](int64_t row, const RowSource& source) { return row < source.first_row; });
  const RowSource& source = *(next - 1);
  return fmt::format("{} row {}", source.name, r - source.first_row);
}

std::vector<int64_t> turn_starts(const Trajectories& trajectories, int64_t r) {
  const int64_t begin = trajectories.offsets[r];
  std::vector<int64_t> starts;
  bool inside = false;
  for (int64_t position = 1; position < trajectories.row_size(r); ++position) {
    const bool carries_loss = trajectories.loss_weights[begin + position] > 0;
    if (carries_loss && !inside) starts.push_back(position);
    inside = carries_loss;
  }
  return starts;
}

std::vector<uint64_t> route_keys(const Trajectories& trajectories) {
  const int64_t width = trajectories.routes_per_token;
  if (width == 0) return {};
  const std::span<const int32_t> routes = trajectories.routed_experts.span();
  std::vector<uint64_t> keys(static_cast<size_t>(trajectories.num_tokens()));
  for (size_t token = 0; token < keys.size(); ++token) {
    uint64_t key = 0;
    for (const int32_t expert : routes.subspan(token * width, width)) {
      key = mix(key + 0x9E3779B97F4A7C15 + static_cast<uint32_t>(expert));
    }
    keys[token] = key;
  }
  return keys;
}

Trajectories slice_rows(const Trajectories& t, int64_t begin, int64_t end) {
  const int64_t first = t.offsets[begin], last = t.offsets[end];
  Trajectories result;
  result.offsets = slice_offsets(t.offsets, begin, end);
  result.input_ids = slice(t.input_ids, first, last);
  result.loss_weights = slice(t.loss_weights, first, last);
  for (const auto& [name, column] : kTokenReals) result.*column = slice(t.*column, first, last, begin, end);
  for (const RowReal& real : kRowReals) result.*real.column = slice(t.*real.column, begin, end, begin, end);
  result.chosen = slice(t.chosen, begin, end, begin, end);
  for (const auto& [name, column] : kRowTexts) result.*column = slice(t.*column, begin, end);
  if (!t.turn_reward_offsets.empty()) {
    result.turn_rewards = slice(t.turn_rewards, t.turn_reward_offsets[begin], t.turn_reward_offsets[end]);
    result.turn_reward_offsets = slice_offsets(t.turn_reward_offsets, begin, end);
  }
  result.ref_topk = t.ref_topk;
  result.target_ids = slice(t.target_ids, first, last);
  result.ref_topk_ids = slice(t.ref_topk_ids, first * t.ref_topk, last * t.ref_topk);
  result.ref_topk_logprobs = slice(t.ref_topk_logprobs, first * t.ref_topk, last * t.ref_topk);
  result.routes_per_token = t.routes_per_token;
  result.routed_experts = slice(t.routed_experts, first * t.routes_per_token, last * t.routes_per_token);
  for (const RowSource& source : t.sources) result.sources.push_back({source.name, source.first_row - begin});
  result.release = t.release;
  return result;
}

std::map<std::string, std::string> content_hashes(const Trajectories& t) {
  std::map<std::string, std::string> hashes;
  const auto add = [&](const char* name, const auto&... columns) {
    ColumnHasher hasher(t.release);
    (hasher.add_column(columns), ...);
    hashes[name] = hasher.digits();
  };
  // The hash includes which rows have the column.
  const auto add_optional = [&](const char* name, const auto& column) {
    if (!column.any()) return;
    std::vector<uint8_t> present(t.num_rows());
    for (int64_t row = 0; row < t.num_rows(); ++row) present[row] = column.has(row);
    add(name, Column<uint8_t>(std::move(present)), column.values);
  };
  const auto number = [](int64_t value) { return Column<int64_t>(std::vector<int64_t>{value}); };
  add("input_ids", t.offsets, t.input_ids);
  add("loss_weights", t.loss_weights);
  for (const auto& [name, column] : kTokenReals) add_optional(name, t.*column);
  for (const RowReal& real : kRowReals) add_optional(real.name, t.*real.column);
  add_optional("chosen", t.chosen);
  add_strings("group_id", t.group_id, &hashes);
  add_strings("pair_id", t.pair_id, &hashes);
  if (!t.turn_reward_offsets.empty()) add("turn_rewards", t.turn_reward_offsets, t.turn_rewards);
  if (t.ref_topk > 0) {
    add("ref_topk_ids", number(t.ref_topk), t.ref_topk_ids);
    add("ref_topk_logprobs", t.ref_topk_logprobs);
  }
  if (t.routes_per_token > 0) add("routed_experts", number(t.routes_per_token), t.routed_experts);
  return hashes;
}

}  // namespace espalier
