// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/builder.h"

#include <algorithm>
#include <array>
#include <utility>

#include "espalier/base/check.h"
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

/// The log-probabilities of a row with 0 for the tokens that have none. `zeros` holds them, if it has to.
std::span<const double> without_nan(std::span<const double> logprobs, const TrajectoryRow& row,
                                    std::vector<double>& zeros) {
  if (std::ranges::none_of(logprobs, [](double value) { return std::isnan(value); })) return logprobs;
  zeros.assign(logprobs.begin(), logprobs.end());
  for (size_t t = 0; t < zeros.size(); ++t) {
    if (std::isnan(zeros[t]) && !row.carries_loss(t)) zeros[t] = 0;
  }
  return zeros;
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
  turn_rewards.clear();
  ref_topk_ids.clear();
  ref_topk_logprobs.clear();
  chosen.reset();
  routed_experts.clear();
  for (const auto text : kTextsOfRow) (this->*text).clear();
  for (const auto real : kRealsOfRow) (this->*real).reset();
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
  check_row_logprobs("logprobs", row.logprobs, row);
  check_optional_length("ref_logprobs", row.ref_logprobs, tokens);
  check_row_logprobs("ref_logprobs", row.ref_logprobs, row);
  if (!row.advantages.empty() && row.advantage)
    throw_field("advantages", "either advantages or advantage", "both");
  check_optional_length("advantages", row.advantages, tokens);
  check_finite("advantages", std::span(row.advantages));
  check_scalar("advantage", row.advantage);
  for (size_t i = 0; i < kRowReals.size(); ++i) {
    if (const auto& value = row.*kRealsOfRow[i]) check_row_real(kRowReals[i], *value);
  }
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

void check_row_logprobs(std::string_view field, const std::vector<double>& logprobs,
                        const TrajectoryRow& row) {
  std::vector<double> zeros;
  check_logprobs(field, without_nan(logprobs, row, zeros));
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
  for (size_t i = 0; i < kRowReals.size(); ++i) {
    const Optional<RealColumn>& column = t.*kRowReals[i].column;
    if (column.has(r)) row.*kRealsOfRow[i] = column.values[r];
  }
  if (t.chosen.has(r)) row.chosen = t.chosen.values[r] != 0;
  if (t.has_turn_rewards(r))
    row.turn_rewards = copy_reals(t.turn_rewards, t.turn_reward_offsets[r], t.turn_reward_offsets[r + 1]);
  if (t.ref_topk > 0 &&
      has_ref_topk(t.ref_topk_ids.span().subspan(begin * t.ref_topk, (end - begin) * t.ref_topk))) {
    row.ref_topk_ids =
        copy_span(t.ref_topk_ids.span().subspan(begin * t.ref_topk, (end - begin) * t.ref_topk));
    row.ref_topk_logprobs = copy_reals(t.ref_topk_logprobs, begin * t.ref_topk, end * t.ref_topk);
  }
  for (size_t i = 0; i < kRowTexts.size(); ++i) {
    const std::vector<std::string>& texts = t.*kRowTexts[i].column;
    if (!texts.empty()) row.*kTextsOfRow[i] = texts[r];
  }
  const int64_t width = t.routes_per_token;
  // The routes of a row without routes are all -1.
  if (width > 0 && end > begin && t.routed_experts[begin * width] >= 0)
    row.routed_experts = copy_span(t.routed_experts.span().subspan(begin * width, (end - begin) * width));
  return row;
}

struct TrajectoriesBuilder::Columns {
  explicit Columns(RowStore rows) : store(std::move(rows)) {
    offsets.fill_to(1, 0);
    turn_reward_offsets.fill_to(1, 0);
    for (size_t i = 0; i < kRowReals.size(); ++i) row_reals.emplace_back(&store);
  }

  /// Appends rows of the same widths, but for their texts.
  void append(const Trajectories& part);
  void append_texts(const Trajectories& part);

  RowStore store;  // first: the columns point to it
  Growing<int64_t> offsets{&store};
  Growing<int32_t> input_ids{&store};
  GrowingReals loss_weights{&store};
  GrowingOptional logprobs{&store}, ref_logprobs{&store}, advantages{&store}, chosen{&store};
  std::vector<GrowingOptional> row_reals;  // in the order of kRowReals
  Growing<int32_t> routed_experts{&store}, ref_topk_ids{&store};
  GrowingReals ref_topk_logprobs{&store}, turn_rewards{&store};
  Growing<int64_t> turn_reward_offsets{&store};
  std::vector<uint8_t> ones;                 // the mask of a row without one
  std::array<std::vector<double>, 2> zeros;  // logprobs and ref_logprobs of a row, where some are NaN
  Trajectories result;                       // texts, routes_per_token, ref_topk and sources
};

void TrajectoriesBuilder::Columns::append(const Trajectories& part) {
  const int64_t rows = part.num_rows();
  const auto rows_before = offsets.size() - 1, tokens_before = input_ids.size();
  const size_t rows_end = rows_before + rows, tokens = tokens_before + part.num_tokens();
  for (int64_t row = 1; row <= rows; ++row) {
    const auto end = static_cast<int64_t>(tokens_before) + part.offsets[row];
    offsets.append(std::span(&end, 1));
  }
  input_ids.append(part.input_ids.span());
  loss_weights.append(part.loss_weights);
  logprobs.append(part.logprobs, rows, tokens_before, tokens);
  ref_logprobs.append(part.ref_logprobs, rows, tokens_before, tokens);
  advantages.append(part.advantages, rows, tokens_before, tokens);
  for (size_t i = 0; i < kRowReals.size(); ++i)
    row_reals[i].append(part.*kRowReals[i].column, rows, rows_before, rows_end);
  chosen.append(part.chosen, rows, rows_before, rows_end);

  const auto before = static_cast<int64_t>(turn_rewards.size());
  turn_rewards.append(part.turn_rewards);
  for (int64_t row = 1; row <= rows; ++row) {
    const int64_t end = before + (part.turn_reward_offsets.empty() ? 0 : part.turn_reward_offsets[row]);
    turn_reward_offsets.append(std::span(&end, 1));
  }

  // Rows without routes or tokens of a reference hold -1.
  result.routes_per_token = std::max(result.routes_per_token, part.routes_per_token);
  result.ref_topk = std::max(result.ref_topk, part.ref_topk);
  const size_t routes = result.routes_per_token, topk = result.ref_topk;
  routed_experts.fill_to(tokens_before * routes, -1);
  routed_experts.append(part.routed_experts.span());
  routed_experts.fill_to(tokens * routes, -1);
  ref_topk_ids.fill_to(tokens_before * topk, -1);
  ref_topk_ids.append(part.ref_topk_ids.span());
  ref_topk_ids.fill_to(tokens * topk, -1);
  ref_topk_logprobs.fill_to(tokens_before * topk);
  ref_topk_logprobs.append(part.ref_topk_logprobs);
  ref_topk_logprobs.fill_to(tokens * topk);
}

void TrajectoriesBuilder::Columns::append_texts(const Trajectories& part) {
  const size_t end = offsets.size() - 1, begin = end - static_cast<size_t>(part.num_rows());
  for (const auto& [name, column] : kRowTexts) {
    std::vector<std::string>& texts = result.*column;
    if (texts.empty() && (part.*column).empty()) continue;
    texts.resize(begin);
    texts.insert(texts.end(), (part.*column).begin(), (part.*column).end());
    texts.resize(end);
  }
}

TrajectoriesBuilder::TrajectoriesBuilder(RowStore store)
    : columns_(std::make_unique<Columns>(std::move(store))) {}
TrajectoriesBuilder::~TrajectoriesBuilder() = default;
TrajectoriesBuilder::TrajectoriesBuilder(TrajectoriesBuilder&&) noexcept = default;

int64_t TrajectoriesBuilder::num_rows() const {
  return static_cast<int64_t>(columns_->offsets.size()) - 1;
}

void TrajectoriesBuilder::check(const TrajectoryRow& row, int64_t vocab_size) const {
  check_row(row, vocab_size);
  const int64_t routes = columns_->result.routes_per_token, ref_topk = columns_->result.ref_topk;
  const int64_t width = size_of(row.routed_experts) / size_of(row.input_ids);
  if (width > 0 && routes > 0 && width != routes)
    throw_field("routed_experts", fmt::format("{} routes per token, as in earlier rows", routes),
                std::to_string(width));
  const int64_t topk = size_of(row.ref_topk_ids) / size_of(row.input_ids);
  if (topk > 0 && ref_topk > 0 && topk != ref_topk)
    throw_field("ref_topk_ids", fmt::format("{} ids for each token, as in earlier rows", ref_topk),
                std::to_string(topk));
}

void TrajectoriesBuilder::append_checked(const TrajectoryRow& row) {
  const auto view = []<typename T>(const std::vector<T>& values) { return Column<T>(values, nullptr); };
  const std::array<int64_t, 2> ends{0, size_of(row.input_ids)}, turns{0, size_of(row.turn_rewards)};
  const uint8_t chosen = row.chosen.value_or(false);
  Trajectories part;
  part.offsets = {ends, nullptr};
  part.input_ids = view(row.input_ids);
  if (!row.loss_weights.empty()) {
    part.loss_weights = view(row.loss_weights);
  } else {
    columns_->ones.resize(row.input_ids.size(), 1);
    part.loss_weights = view(row.loss_mask.empty() ? columns_->ones : row.loss_mask);
  }
  const auto view_logprobs = [&](const std::vector<double>& values, std::vector<double>& zeros) {
    return Column<double>(without_nan(values, row, zeros), nullptr);
  };
  part.logprobs.values = view_logprobs(row.logprobs, columns_->zeros[0]);
  part.ref_logprobs.values = view_logprobs(row.ref_logprobs, columns_->zeros[1]);
  part.advantages.values =
      row.advantage ? std::vector<double>(row.input_ids.size(), *row.advantage) : view(row.advantages);
  for (size_t i = 0; i < kRowReals.size(); ++i) {
    const std::optional<double>& value = row.*kRealsOfRow[i];
    if (value) (part.*kRowReals[i].column).values = Column<double>({&*value, 1}, nullptr);
  }
  if (row.chosen) part.chosen.values = {{&chosen, 1}, nullptr};
  part.turn_reward_offsets = {turns, nullptr};
  part.turn_rewards = view(row.turn_rewards);
  part.ref_topk = size_of(row.ref_topk_ids) / ends[1];
  part.ref_topk_ids = view(row.ref_topk_ids);
  part.ref_topk_logprobs = view(row.ref_topk_logprobs);
  part.routes_per_token = size_of(row.routed_experts) / ends[1];
  part.routed_experts = view(row.routed_experts);
  for (size_t i = 0; i < kRowTexts.size(); ++i) {
    const std::string& text = row.*kTextsOfRow[i];
    if (!text.empty()) (part.*kRowTexts[i].column).push_back(text);
  }
  columns_->append(part);
  columns_->append_texts(part);
}

void TrajectoriesBuilder::begin_source(const std::string& name) {
  columns_->result.sources.push_back({name, num_rows()});
}

void TrajectoriesBuilder::append(const Trajectories& part, const std::string& name) {
  const int64_t routes = columns_->result.routes_per_token, topk = columns_->result.ref_topk;
  ESPALIER_CHECK(routes == 0 || part.routes_per_token == 0 || routes == part.routes_per_token,
                 "{}: field `routed_experts`: expected {} routes per token, as in earlier files, received {}",
                 name, routes, part.routes_per_token);
  ESPALIER_CHECK(topk == 0 || part.ref_topk == 0 || topk == part.ref_topk,
                 "{}: field `ref_topk_ids`: expected {} ids for each token, as in earlier files, received {}",
                 name, topk, part.ref_topk);
  begin_source(name);
  // A mapped part is released as it is read.
  constexpr int64_t kTokens = int64_t{1} << 24;
  for (int64_t begin = 0, end = 0; begin < part.num_rows(); begin = end) {
    while (end < part.num_rows() && (end == begin || part.offsets[end + 1] - part.offsets[begin] <= kTokens))
      ++end;
    const Trajectories rows = slice_rows(part, begin, end);
    columns_->append(rows);
    columns_->append_texts(rows);
    if (part.release) part.release();
  }
}

Trajectories TrajectoriesBuilder::finish() {
  const std::unique_ptr<Columns> finished = std::exchange(columns_, std::make_unique<Columns>(RowStore{}));
  Columns& all = *finished;
  Trajectories result = std::move(all.result);
  result.offsets = all.offsets.finish();
  result.input_ids = all.input_ids.finish();
  result.loss_weights = all.loss_weights.finish();
  result.logprobs = all.logprobs.finish();
  result.ref_logprobs = all.ref_logprobs.finish();
  result.advantages = all.advantages.finish();
  for (size_t i = 0; i < kRowReals.size(); ++i) result.*kRowReals[i].column = all.row_reals[i].finish();
  if (const Optional<RealColumn> chosen = all.chosen.finish(); chosen.any())
    result.chosen = {std::get<Column<uint8_t>>(chosen.values.values()), chosen.present};
  result.routed_experts = all.routed_experts.finish();
  if (all.turn_rewards.size() > 0) {
    result.turn_reward_offsets = all.turn_reward_offsets.finish();
    result.turn_rewards = all.turn_rewards.finish();
  }
  result.ref_topk_ids = all.ref_topk_ids.finish();
  result.ref_topk_logprobs = all.ref_topk_logprobs.finish();
  if (!all.store.mappings.empty()) {
    result.release = [mappings = all.store.mappings] {
      for (const auto& mapping : mappings) mapping->release();
    };
  }
  return result;
}

}  // namespace espalier
