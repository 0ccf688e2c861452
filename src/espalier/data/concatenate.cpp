// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/concatenate.h"

#include <algorithm>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "espalier/base/check.h"

namespace espalier {
namespace {

template <typename T>
void append_span(std::vector<T>* values, std::span<const T> more) {
  values->insert(values->end(), more.begin(), more.end());
}

/// A real column of the type of its first part, or of doubles once a part has another type.
class GrowingReals {
 public:
  void start_like(const RealColumn& part) {
    std::visit([this](const auto& column) { values_ = empty_like(column); }, part.values());
  }

  void append(const RealColumn& part) {
    std::visit(
        [this](const auto& column) {
          using Values = decltype(empty_like(column));
          if (auto* same = std::get_if<Values>(&values_)) return append_span(same, column.span());
          std::vector<double>& doubles = as_doubles();
          doubles.insert(doubles.end(), column.span().begin(), column.span().end());
        },
        part.values());
  }

  void append_zeros(size_t count) {
    std::visit([count](auto& values) { values.resize(values.size() + count); }, values_);
  }

  RealColumn finish() {
    return std::visit([](auto& values) { return RealColumn(Column(std::move(values))); }, values_);
  }

 private:
  template <typename T>
  static std::vector<T> empty_like(const Column<T>&) {
    return {};
  }

  std::vector<double>& as_doubles() {
    if (!std::holds_alternative<std::vector<double>>(values_)) {
      std::vector<double> doubles;
      std::visit([&doubles](const auto& values) { doubles.assign(values.begin(), values.end()); }, values_);
      values_ = std::move(doubles);
    }
    return std::get<std::vector<double>>(values_);
  }

  std::variant<std::vector<uint8_t>, std::vector<float>, std::vector<double>> values_;
};

/// A column of bytes with the interface of GrowingReals.
class GrowingBytes {
 public:
  void start_like(const Column<uint8_t>&) {}
  void append(const Column<uint8_t>& part) { append_span(&values_, part.span()); }
  void append_zeros(size_t count) { values_.resize(values_.size() + count); }
  Column<uint8_t> finish() { return std::move(values_); }

 private:
  std::vector<uint8_t> values_;
};

/// The numbers of rows and values of a column before a part, and in the part.
struct Place {
  size_t rows_before, rows, size_before, size;
};

/// A column that rows or whole parts may lack.
template <typename Growing, typename Values>
class GrowingOptional {
 public:
  void append(const Optional<Values>& part, const Place& place) {
    if (!any_ && part.any()) {
      any_ = true;
      values_.start_like(part.values);
      values_.append_zeros(place.size_before);
      present_.assign(place.rows_before, 0);
    }
    if (!any_) return;
    if (part.any()) {
      values_.append(part.values);
    } else {
      values_.append_zeros(place.size);
    }
    for (size_t row = 0; row < place.rows; ++row) present_.push_back(part.has(static_cast<int64_t>(row)));
  }

  Optional<Values> finish() {
    Optional<Values> column;
    if (!any_) return column;
    column.values = values_.finish();
    const bool everywhere = std::find(present_.begin(), present_.end(), 0) == present_.end();
    if (!everywhere) column.present = std::move(present_);
    return column;
  }

 private:
  bool any_ = false;
  Growing values_;
  std::vector<uint8_t> present_;
};

void append_texts(std::vector<std::string>* texts, const std::vector<std::string>& part, const Place& place) {
  if (texts->empty() && part.empty()) return;
  texts->resize(place.rows_before);
  texts->insert(texts->end(), part.begin(), part.end());
  texts->resize(place.rows_before + place.rows);
}

}  // namespace

struct Concatenation::Columns {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> input_ids;
  GrowingReals loss_weights;
  GrowingOptional<GrowingReals, RealColumn> logprobs, ref_logprobs, advantages, reward;
  GrowingOptional<GrowingBytes, Column<uint8_t>> chosen;
  std::vector<int32_t> routed_experts, ref_topk_ids;
  GrowingReals ref_topk_logprobs, turn_rewards;
  std::vector<int64_t> turn_reward_offsets;  // as long as offsets
  Trajectories result;                       // texts, routes_per_token, ref_topk and sources
};

Concatenation::Concatenation() : columns_(std::make_unique<Columns>()) {}
Concatenation::~Concatenation() = default;

void Concatenation::append(const Trajectories& part, const std::string& name) {
  Columns& all = *columns_;
  Trajectories& result = all.result;
  const Place tokens{all.offsets.size() - 1, static_cast<size_t>(part.num_rows()), all.input_ids.size(),
                     static_cast<size_t>(part.num_tokens())};
  const Place rows{tokens.rows_before, tokens.rows, tokens.rows_before, tokens.rows};
  const int64_t width = result.routes_per_token;
  ESPALIER_CHECK(width == 0 || part.routes_per_token == 0 || width == part.routes_per_token,
                 "{}: field `routed_experts`: expected {} routes per token, as in earlier files, received {}",
                 name, width, part.routes_per_token);

  result.sources.push_back({name, static_cast<int64_t>(tokens.rows_before)});
  for (int64_t row = 1; row <= part.num_rows(); ++row)
    all.offsets.push_back(static_cast<int64_t>(tokens.size_before) + part.offsets[row]);
  append_span(&all.input_ids, part.input_ids.span());
  if (tokens.rows_before == 0) all.loss_weights.start_like(part.loss_weights);
  all.loss_weights.append(part.loss_weights);
  all.logprobs.append(part.logprobs, tokens);
  all.ref_logprobs.append(part.ref_logprobs, tokens);
  all.advantages.append(part.advantages, tokens);
  all.reward.append(part.reward, rows);
  all.chosen.append(part.chosen, rows);
  append_texts(&result.trajectory_id, part.trajectory_id, rows);
  append_texts(&result.group_id, part.group_id, rows);
  append_texts(&result.pair_id, part.pair_id, rows);

  append_turn_rewards(part);
  append_ref_topk(part, name, tokens.size_before);

  // The routes of rows without routes are all -1.
  result.routes_per_token = std::max(width, part.routes_per_token);
  const auto routes_per_token = static_cast<size_t>(result.routes_per_token);
  all.routed_experts.resize(tokens.size_before * routes_per_token, -1);
  append_span(&all.routed_experts, part.routed_experts.span());
  all.routed_experts.resize((tokens.size_before + tokens.size) * routes_per_token, -1);
}

void Concatenation::append_turn_rewards(const Trajectories& part) {
  Columns& all = *columns_;
  const int64_t before = all.turn_reward_offsets.empty() ? 0 : all.turn_reward_offsets.back();
  if (all.turn_reward_offsets.empty()) all.turn_reward_offsets.push_back(0);
  if (before == 0) all.turn_rewards.start_like(part.turn_rewards);
  all.turn_rewards.append(part.turn_rewards);
  for (int64_t row = 1; row <= part.num_rows(); ++row) {
    const bool any = !part.turn_reward_offsets.empty();
    all.turn_reward_offsets.push_back(before + (any ? part.turn_reward_offsets[row] : 0));
  }
}

void Concatenation::append_ref_topk(const Trajectories& part, const std::string& name, size_t tokens_before) {
  Columns& all = *columns_;
  int64_t& topk = all.result.ref_topk;
  ESPALIER_CHECK(topk == 0 || part.ref_topk == 0 || topk == part.ref_topk,
                 "{}: field `ref_topk_ids`: expected {} ids for each token, as in earlier files, received {}",
                 name, topk, part.ref_topk);
  if (topk == 0) {
    topk = part.ref_topk;
    all.ref_topk_logprobs.start_like(part.ref_topk_logprobs);
    all.ref_topk_logprobs.append_zeros(tokens_before * static_cast<size_t>(topk));
  }
  const auto width = static_cast<size_t>(topk), tokens = static_cast<size_t>(part.num_tokens());
  all.ref_topk_ids.resize(tokens_before * width, -1);
  append_span(&all.ref_topk_ids, part.ref_topk_ids.span());
  all.ref_topk_ids.resize((tokens_before + tokens) * width, -1);
  if (part.ref_topk > 0) {
    all.ref_topk_logprobs.append(part.ref_topk_logprobs);
  } else {
    all.ref_topk_logprobs.append_zeros(tokens * width);
  }
}

Trajectories Concatenation::finish() {
  Columns& all = *columns_;
  Trajectories result = std::move(all.result);
  result.offsets = std::move(all.offsets);
  result.input_ids = std::move(all.input_ids);
  result.loss_weights = all.loss_weights.finish();
  result.logprobs = all.logprobs.finish();
  result.ref_logprobs = all.ref_logprobs.finish();
  result.advantages = all.advantages.finish();
  result.reward = all.reward.finish();
  result.chosen = all.chosen.finish();
  result.routed_experts = std::move(all.routed_experts);
  if (!all.turn_reward_offsets.empty() && all.turn_reward_offsets.back() > 0) {
    result.turn_reward_offsets = std::move(all.turn_reward_offsets);
    result.turn_rewards = all.turn_rewards.finish();
  }
  result.ref_topk_ids = std::move(all.ref_topk_ids);
  result.ref_topk_logprobs = all.ref_topk_logprobs.finish();
  return result;
}

}  // namespace espalier
