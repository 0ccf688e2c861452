// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/builder.h"

#include <utility>

#include "espalier/data/row_checks.h"

namespace espalier {
namespace {

template <typename T>
int64_t size_of(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size());
}

template <typename T>
void check_optional_length(std::string_view field, const std::vector<T>& values, int64_t tokens) {
  if (!values.empty()) check_length(field, size_of(values), tokens);
}

template <typename T>
void check_turns(const TrajectoryRow& row, const std::vector<T>& weights) {
  check_turn_rewards(std::span(row.turn_rewards), count_turns(std::span(weights)));
}

void check_scalar(std::string_view field, const std::optional<double>& value) {
  if (value && !std::isfinite(*value)) throw_field(field, "a finite number", fmt::format("{}", *value));
}

template <typename T>
std::vector<T> copy_span(std::span<const T> values) {
  return {values.begin(), values.end()};
}

std::vector<double> copy_reals(const RealColumn& column, int64_t begin, int64_t end) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(end - begin));
  for (int64_t i = begin; i < end; ++i) values.push_back(column[i]);
  return values;
}

}  // namespace

void TrajectoryRow::clear() {
  input_ids.clear();
  loss_mask.clear();
  loss_weights.clear();
  logprobs.clear();
  ref_logprobs.clear();
  advantages.clear();
  advantage.reset();
  reward.reset();
  turn_rewards.clear();
  ref_topk_ids.clear();
  ref_topk_logprobs.clear();
  chosen.reset();
  trajectory_id.clear();
  group_id.clear();
  pair_id.clear();
  routed_experts.clear();
}

void check_row(const TrajectoryRow& row, int64_t vocab_size) {
  check_token_ids(row.input_ids, vocab_size);
  const int64_t tokens = size_of(row.input_ids);
  if (!row.loss_mask.empty() && !row.loss_weights.empty())
    throw_field("loss_mask", "either loss_mask or loss_weights", "both");
  check_optional_length("loss_mask", row.loss_mask, tokens);
  check_values("loss_mask", std::span(row.loss_mask), "0 or 1", [](uint8_t value) { return value <= 1; });
  check_optional_length("loss_weights", row.loss_weights, tokens);
  check_loss_weights(std::span(row.loss_weights));
  check_optional_length("logprobs", row.logprobs, tokens);
  check_logprobs("logprobs", std::span(row.logprobs));
  check_optional_length("ref_logprobs", row.ref_logprobs, tokens);
  check_logprobs("ref_logprobs", std::span(row.ref_logprobs));
  if (!row.advantages.empty() && row.advantage)
    throw_field("advantages", "either advantages or advantage", "both");
  check_optional_length("advantages", row.advantages, tokens);
  check_finite("advantages", std::span(row.advantages));
  check_scalar("advantage", row.advantage);
  check_scalar("reward", row.reward);
  if (!row.turn_rewards.empty()) {
    if (row.reward) throw_field("turn_rewards", "either turn_rewards or reward", "both");
    if (!row.loss_weights.empty()) {
      check_turns(row, row.loss_weights);
    } else {
      check_turns(row, row.loss_mask.empty() ? std::vector<uint8_t>(row.input_ids.size(), 1) : row.loss_mask);
    }
  }
  check_ref_topk(std::span(row.ref_topk_ids), std::span(row.ref_topk_logprobs), tokens, vocab_size);
  check_routes(row.routed_experts);
  if (size_of(row.routed_experts) % tokens != 0)
    throw_field("routed_experts", fmt::format("as many routes for each of {} tokens", tokens),
                fmt::format("{} routes", row.routed_experts.size()));
}

TrajectoryRow copy_row(const Trajectories& t, int64_t r) {
  const int64_t begin = t.offsets[r], end = t.offsets[r + 1];
  TrajectoryRow row;
  row.input_ids = copy_span(t.row(r));
  if (const auto* mask = std::get_if<Column<uint8_t>>(&t.loss_weights.values())) {
    row.loss_mask = copy_span(mask->span().subspan(begin, end - begin));
  } else {
    row.loss_weights = copy_reals(t.loss_weights, begin, end);
  }
  if (t.logprobs.has(r)) row.logprobs = copy_reals(t.logprobs.values, begin, end);
  if (t.ref_logprobs.has(r)) row.ref_logprobs = copy_reals(t.ref_logprobs.values, begin, end);
  if (t.advantages.has(r)) row.advantages = copy_reals(t.advantages.values, begin, end);
  if (t.reward.has(r)) row.reward = t.reward.values[r];
  if (t.chosen.has(r)) row.chosen = t.chosen.values[r] != 0;
  if (t.has_turn_rewards(r))
    row.turn_rewards = copy_reals(t.turn_rewards, t.turn_reward_offsets[r], t.turn_reward_offsets[r + 1]);
  if (t.ref_topk > 0 &&
      has_ref_topk(t.ref_topk_ids.span().subspan(begin * t.ref_topk, (end - begin) * t.ref_topk))) {
    row.ref_topk_ids =
        copy_span(t.ref_topk_ids.span().subspan(begin * t.ref_topk, (end - begin) * t.ref_topk));
    row.ref_topk_logprobs = copy_reals(t.ref_topk_logprobs, begin * t.ref_topk, end * t.ref_topk);
  }
  if (!t.trajectory_id.empty()) row.trajectory_id = t.trajectory_id[r];
  if (!t.group_id.empty()) row.group_id = t.group_id[r];
  if (!t.pair_id.empty()) row.pair_id = t.pair_id[r];
  const int64_t width = t.routes_per_token;
  // The routes of a row without routes are all -1.
  if (width > 0 && end > begin && t.routed_experts[begin * width] >= 0)
    row.routed_experts = copy_span(t.routed_experts.span().subspan(begin * width, (end - begin) * width));
  return row;
}

template <typename T>
void TrajectoriesBuilder::GrowingColumn<T>::append(std::span<const T> row, size_t size_before) {
  if (!any) values.resize(size_before);
  any = true;
  values.insert(values.end(), row.begin(), row.end());
  present.push_back(1);
}

template <typename T>
void TrajectoriesBuilder::GrowingColumn<T>::append_absent(size_t count) {
  if (any) values.resize(values.size() + count);
  present.push_back(0);
}

template <typename T>
template <typename Values>
Optional<Values> TrajectoriesBuilder::GrowingColumn<T>::finish() {
  Optional<Values> column;
  if (!any) return column;
  column.values = Values(Column<T>(std::move(values)));
  for (const uint8_t row_present : present) {
    if (row_present == 0) {
      column.present = Column<uint8_t>(std::move(present));
      break;
    }
  }
  return column;
}

void TrajectoriesBuilder::append(const TrajectoryRow& row, int64_t vocab_size) {
  check_row(row, vocab_size);
  const int64_t width = size_of(row.routed_experts) / size_of(row.input_ids);
  if (width > 0 && routes_per_token_ > 0 && width != routes_per_token_)
    throw_field("routed_experts", fmt::format("{} routes per token, as in earlier rows", routes_per_token_),
                std::to_string(width));
  const int64_t topk = size_of(row.ref_topk_ids) / size_of(row.input_ids);
  if (topk > 0 && ref_topk_ > 0 && topk != ref_topk_)
    throw_field("ref_topk_ids", fmt::format("{} ids for each token, as in earlier rows", ref_topk_),
                std::to_string(topk));

  const size_t tokens_before = input_ids_.size();
  const size_t rows_before = static_cast<size_t>(num_rows());
  const size_t tokens = row.input_ids.size();
  append_weights(row);
  for (const auto& [column, values] :
       {std::pair(&logprobs_, &row.logprobs), {&ref_logprobs_, &row.ref_logprobs}}) {
    if (values->empty()) {
      column->append_absent(tokens);
    } else {
      column->append(*values, tokens_before);
    }
  }
  append_advantages(row, tokens_before);
  if (row.reward) {
    reward_.append({&*row.reward, 1}, rows_before);
  } else {
    reward_.append_absent(1);
  }
  if (row.chosen) {
    const uint8_t chosen = *row.chosen;
    chosen_.append({&chosen, 1}, rows_before);
  } else {
    chosen_.append_absent(1);
  }
  append_text(trajectory_id_, row.trajectory_id);
  append_text(group_id_, row.group_id);
  append_text(pair_id_, row.pair_id);
  if (width > 0) routes_per_token_ = width;
  append_routes(row, tokens_before);
  append_turn_rewards(row);
  if (topk > 0) ref_topk_ = topk;
  append_ref_topk(row, tokens_before);
  input_ids_.insert(input_ids_.end(), row.input_ids.begin(), row.input_ids.end());
  offsets_.push_back(size_of(input_ids_));
}

void TrajectoriesBuilder::append_weights(const TrajectoryRow& row) {
  if (!row.loss_weights.empty() && !has_weights_) {
    has_weights_ = true;
    loss_weights_.assign(loss_mask_.begin(), loss_mask_.end());
    loss_mask_ = {};
  }
  const auto append_to = [&row](auto& column) {
    if (!row.loss_weights.empty()) {
      column.insert(column.end(), row.loss_weights.begin(), row.loss_weights.end());
    } else if (!row.loss_mask.empty()) {
      column.insert(column.end(), row.loss_mask.begin(), row.loss_mask.end());
    } else {
      column.insert(column.end(), row.input_ids.size(), 1);
    }
  };
  if (has_weights_) {
    append_to(loss_weights_);
  } else {
    append_to(loss_mask_);
  }
}

void TrajectoriesBuilder::append_advantages(const TrajectoryRow& row, size_t tokens_before) {
  const size_t tokens = row.input_ids.size();
  if (row.advantage) {
    const std::vector<double> spread(tokens, *row.advantage);
    advantages_.append(spread, tokens_before);
  } else if (!row.advantages.empty()) {
    advantages_.append(row.advantages, tokens_before);
  } else {
    advantages_.append_absent(tokens);
  }
}

void TrajectoriesBuilder::append_text(std::vector<std::string>& column, const std::string& text) {
  if (column.empty() && text.empty()) return;
  column.resize(static_cast<size_t>(num_rows()));
  column.push_back(text);
}

void TrajectoriesBuilder::append_routes(const TrajectoryRow& row, size_t tokens_before) {
  if (routes_per_token_ == 0) return;
  const size_t width = static_cast<size_t>(routes_per_token_);
  routed_experts_.resize(tokens_before * width, -1);
  routed_experts_.insert(routed_experts_.end(), row.routed_experts.begin(), row.routed_experts.end());
  routed_experts_.resize((tokens_before + row.input_ids.size()) * width, -1);
}

void TrajectoriesBuilder::append_turn_rewards(const TrajectoryRow& row) {
  turn_rewards_.insert(turn_rewards_.end(), row.turn_rewards.begin(), row.turn_rewards.end());
  turn_reward_offsets_.push_back(size_of(turn_rewards_));
}

void TrajectoriesBuilder::append_ref_topk(const TrajectoryRow& row, size_t tokens_before) {
  if (ref_topk_ == 0) return;
  const size_t width = static_cast<size_t>(ref_topk_), end = (tokens_before + row.input_ids.size()) * width;
  ref_topk_ids_.resize(tokens_before * width, -1);
  ref_topk_ids_.insert(ref_topk_ids_.end(), row.ref_topk_ids.begin(), row.ref_topk_ids.end());
  ref_topk_ids_.resize(end, -1);
  ref_topk_logprobs_.resize(tokens_before * width);
  ref_topk_logprobs_.insert(ref_topk_logprobs_.end(), row.ref_topk_logprobs.begin(),
                            row.ref_topk_logprobs.end());
  ref_topk_logprobs_.resize(end);
}

Trajectories TrajectoriesBuilder::finish() {
  Trajectories result;
  for (std::vector<std::string>* column : {&trajectory_id_, &group_id_, &pair_id_}) {
    if (!column->empty()) column->resize(static_cast<size_t>(num_rows()));
  }
  result.offsets = Column<int64_t>(std::move(offsets_));
  result.input_ids = Column<int32_t>(std::move(input_ids_));
  if (has_weights_) {
    result.loss_weights = Column<double>(std::move(loss_weights_));
  } else {
    result.loss_weights = Column<uint8_t>(std::move(loss_mask_));
  }
  result.logprobs = logprobs_.finish<RealColumn>();
  result.ref_logprobs = ref_logprobs_.finish<RealColumn>();
  result.advantages = advantages_.finish<RealColumn>();
  result.reward = reward_.finish<RealColumn>();
  result.chosen = chosen_.finish<Column<uint8_t>>();
  result.trajectory_id = std::move(trajectory_id_);
  result.group_id = std::move(group_id_);
  result.pair_id = std::move(pair_id_);
  result.routed_experts = Column<int32_t>(std::move(routed_experts_));
  result.routes_per_token = routes_per_token_;
  if (!turn_rewards_.empty()) {
    result.turn_reward_offsets = Column<int64_t>(std::move(turn_reward_offsets_));
    result.turn_rewards = Column<double>(std::move(turn_rewards_));
  }
  result.ref_topk_ids = Column<int32_t>(std::move(ref_topk_ids_));
  result.ref_topk_logprobs = Column<double>(std::move(ref_topk_logprobs_));
  result.ref_topk = ref_topk_;
  *this = TrajectoriesBuilder();
  return result;
}

}  // namespace espalier
