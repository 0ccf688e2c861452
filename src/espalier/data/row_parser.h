// SPDX-License-Identifier: Apache-2.0
// Parsing one row, whatever holds its values: JSON, or objects of Python.
#pragma once

#include <array>
#include <bitset>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "espalier/data/builder.h"
#include "espalier/data/fields.h"
#include "espalier/data/reader.h"
#include "espalier/data/row_checks.h"

namespace espalier {

/// Parses fields into rows, and reuses its memory from row to row. A value of a field is an Element:
///
///   bool is_null(), is_text(), is_integer()   an integer may be of any size; true and false are none
///   bool get(bool&), get(int64_t&), get(double&)      false: it is something else, or does not fit
///   bool get(std::string&)          text, or the digits of an integer
///   std::optional<List> list()      its elements: size(), begin(), end()
///   bool copy(std::vector<T>&)      the values of an array of exactly this type; false: it is none
///   std::string described()         for messages
///
/// begin(), add() each field, and then finish(). Faults throw InputError "field `F`: expected E, received R".
template <typename Element>
class RowParser {
 public:
  /// `recorded`: rows are as programs record them. Then a mask may have floats, ids are text that is not
  /// empty, and what the first token has is no fault: it carries no loss, and its log-probability is 0.
  explicit RowParser(int64_t vocab_size, bool recorded = false)
      : vocab_size_(vocab_size), recorded_(recorded) {}

  void begin() {
    row_.clear();
    seen_.reset();
    present_.reset();
    number_ids_.reset();
    first_name_.fill(kNumFieldNames);
    route_shape_ = {};
    topk_ = 0;
  }

  /// Adds a field. Null counts as missing. Returns false for a name that is not part of the format.
  bool add(std::string_view key, const Element& value) {
    const std::optional<size_t> name = find_field_name(key);
    if (!name) return false;
    if (seen_[*name]) throw_field(key, "one value", "the field twice");
    seen_.set(*name);
    if (value.is_null()) return true;
    present_.set(*name);
    elements_[*name] = value;
    return true;
  }

  bool has_ids() const { return present_[kInputIdsName]; }
  /// Whether input_ids were added, if only as null.
  bool has_seen_ids() const { return seen_[kInputIdsName]; }

  /// The row, valid until the next begin(). Checks types, integer ranges, nulls and that several names of one
  /// field agree; check_row checks the rest. Log-probabilities that are null or not finite are NaN, which
  /// only tokens without loss may have; such advantages are 0.
  const TrajectoryRow& finish() {
    if (!has_ids()) throw_field("input_ids", "a list of token ids", has_seen_ids() ? "null" : "none");
    // input_ids come first in the table, so the other fields can be compared with them.
    for (size_t name = 0; name < kNumFieldNames; ++name) {
      if (present_[name]) read(name);
    }
    check_together();
    if (recorded_ && !row_.loss_mask.empty()) row_.loss_mask[0] = 0;
    if (recorded_ && !row_.loss_weights.empty()) row_.loss_weights[0] = 0;
    return row_;
  }

  /// Counts the fields of the last row as good. All later rows must have its shape of routed_experts.
  void keep(FieldTally* tally) {
    if (!row_.routed_experts.empty()) kept_route_shape_ = route_shape_;
    if (topk_ > 0) kept_topk_ = topk_;
    for (size_t name = 0; name < kNumFieldNames; ++name) {
      tally->rows[name] += present_[name];
      tally->number_rows[name] += number_ids_[name];
    }
    tally->tokens += tokens();
    if (!row_.loss_weights.empty()) {
      tally->loss_tokens += count_loss_tokens(std::span<const double>(row_.loss_weights));
    } else if (!row_.loss_mask.empty()) {
      tally->loss_tokens += count_loss_tokens(std::span<const uint8_t>(row_.loss_mask));
    } else {
      tally->loss_tokens += tokens() - 1;
      ++tally->rows_without_mask;
    }
  }

 private:
  void read(size_t name) {
    const Field field = kFieldNames[name].field;
    const size_t first = std::exchange(first_name_[static_cast<size_t>(field)], name);
    const bool again = first < kNumFieldNames;
    if (again) first_name_[static_cast<size_t>(field)] = first;
    switch (field) {
      case Field::kInputIds:
        return read_ids();
      case Field::kLossMask:
        read_mask(name, again ? other_mask_ : row_.loss_mask);
        if (again)
          check_same_mask(kFieldNames[name].name, other_mask_, kFieldNames[first].name, row_.loss_mask);
        return;
      case Field::kLossWeights:
        return read_reals(name, row_.loss_weights);
      case Field::kLogprobs:
      case Field::kRefLogprobs: {
        std::vector<double>& values = field == Field::kLogprobs ? row_.logprobs : row_.ref_logprobs;
        read_logprobs(name, again ? other_values_ : values);
        if (again)
          check_same_values(kFieldNames[name].name, std::span<const double>(other_values_),
                            kFieldNames[first].name, std::span<const double>(values));
        return;
      }
      case Field::kAdvantages:
        return read_reals(name, row_.advantages);
      case Field::kAdvantage:
        return read_real(name, row_.advantage);
      case Field::kReward:
        return read_real(name, row_.reward);
      case Field::kTemperature:
        return read_real(name, row_.temperature);
      case Field::kTopK:
        return read_real(name, row_.top_k);
      case Field::kTopP:
        return read_real(name, row_.top_p);
      case Field::kTurnRewards:
        return read_reals(name, row_.turn_rewards);
      case Field::kRefTopkIds:
        return read_topk(name, row_.ref_topk_ids, int32_t{-1});
      case Field::kRefTopkLogprobs:
        return read_topk(name, row_.ref_topk_logprobs, 0.0);
      case Field::kGroupId:
        return read_text(name, row_.group_id);
      case Field::kTrajectoryId:
        return read_text(name, row_.trajectory_id);
      case Field::kPairId:
        return read_text(name, row_.pair_id);
      case Field::kChosen: {
        bool chosen = false;
        if (!elements_[name].get(chosen))
          throw_field(kFieldNames[name].name, "true or false", elements_[name].described());
        row_.chosen = chosen;
        return;
      }
      case Field::kRoutedExperts:
        return read_routes(name);
    }
  }

  void read_ids() {
    if (elements_[kInputIdsName].copy(row_.input_ids)) return;
    for (const Element& item : list_of("input_ids", elements_[kInputIdsName], "a list of token ids")) {
      int64_t id = -1;
      if (!item.get(id) || id < 0 || id > std::numeric_limits<int32_t>::max()) [[unlikely]] {
        if (item.is_integer()) throw_token_id(item.described(), tokens(), vocab_size_);
        throw_field("input_ids", "integers", at_index(item, row_.input_ids.size()));
      }
      row_.input_ids.push_back(static_cast<int32_t>(id));
    }
  }

  void read_mask(size_t name, std::vector<uint8_t>& mask) {
    const std::string_view field = kFieldNames[name].name;
    mask.clear();
    if (field == kLabels) {
      read_labels(mask);
    } else if (!elements_[name].copy(mask)) {
      for (const Element& item : list_of(field, elements_[name], "a list of 0 and 1")) {
        int64_t value = -1;
        bool truth = false;
        if (double real = -1; recorded_ && item.get(real) && (real == 0 || real == 1)) {
          value = real == 1;
        } else if (item.get(truth)) {
          value = truth;
        } else if (!item.get(value) || (value != 0 && value != 1)) {
          throw_field(field, "0, 1, true or false", at_index(item, mask.size()));
        }
        mask.push_back(static_cast<uint8_t>(value));
      }
    }
    check_size(name, mask.size());
  }

  void read_labels(std::vector<uint8_t>& mask) {
    const size_t name = *find_field_name(kLabels);
    labels_.clear();
    for (const Element& item : list_of(kLabels, elements_[name], "a list of token ids and -100")) {
      int64_t label = 0;
      if (!item.get(label)) [[unlikely]]
        throw_field(kLabels, "integers", at_index(item, labels_.size()));
      labels_.push_back(label);
    }
    check_size(name, labels_.size());
    check_labels<int64_t>(labels_, row_.input_ids);
    for (const int64_t label : labels_) mask.push_back(label != kNoLabel);
  }

  void read_reals(size_t name, std::vector<double>& values) {
    const std::string_view field = kFieldNames[name].name;
    const bool are_advantages = kFieldNames[name].field == Field::kAdvantages;
    if (!elements_[name].copy(values)) {
      for (const Element& item : list_of(field, elements_[name], "a list of numbers")) {
        double value = 0;
        const bool is_number = item.get(value);
        if (are_advantages && is_unscored(item, value, values.size())) {
          value = 0;
        } else if (!is_number || (are_advantages && !std::isfinite(value))) [[unlikely]] {
          throw_field(field, are_advantages ? kNumbersOfLoss : "numbers", at_index(item, values.size()));
        }
        values.push_back(value);
      }
    }
    if (kFieldNames[name].field != Field::kTurnRewards) check_size(name, values.size());
  }

  void read_logprobs(size_t name, std::vector<double>& values) {
    const std::string_view field = kFieldNames[name].name;
    values.clear();
    if (!elements_[name].copy(values)) {
      for (const Element& item : list_of(field, elements_[name], "a list of log-probabilities")) {
        double value = 0;
        const bool is_number = item.get(value);
        if (is_unscored(item, value, values.size())) {
          value = std::numeric_limits<double>::quiet_NaN();
        } else if (!is_number || !std::isfinite(value)) [[unlikely]] {
          if (!recorded_ || !values.empty())
            throw_field(field, kNumbersOfLoss, at_index(item, values.size()));
        }
        values.push_back(value);
      }
    }
    check_size(name, values.size());
    if (!values.empty() && (recorded_ || std::isnan(values[0]))) values[0] = 0;
    // Faults of an alias name the alias; check_row checks the field's own name.
    if (field != name_of(kFieldNames[name].field)) check_row_logprobs(field, values, row_);
  }

  /// Whether a value has no number, and its token needs none.
  bool is_unscored(const Element& item, double value, size_t token) const {
    return !row_.carries_loss(token) && (item.is_null() || !std::isfinite(value));
  }

  void read_text(size_t name, std::string& text) {
    const Element& element = elements_[name];
    if (!element.get(text))
      throw_field(kFieldNames[name].name, "a string or an integer", element.described());
    if (recorded_ && text.empty())
      throw_field(kFieldNames[name].name, "text that is not empty", "an empty one");
    number_ids_[name] = !element.is_text();
  }

  void read_real(size_t name, std::optional<double>& value) {
    if (!elements_[name].get(value.emplace()))
      throw_field(kFieldNames[name].name, "a number", elements_[name].described());
  }

  /// Reads one list per token. Non-empty lists must have equal lengths; null is an empty list.
  template <typename T>
  void read_topk(size_t name, std::vector<T>& values, T absent) {
    const std::string_view field = kFieldNames[name].name;
    constexpr bool kAreIds = std::is_same_v<T, int32_t>;
    std::vector<size_t>& sizes = topk_sizes_[kAreIds ? 0 : 1];
    sizes.clear();
    for (const Element& item : list_of(field, elements_[name], "a list for every token")) {
      const size_t begin = values.size();
      if (!item.is_null()) {
        for (const Element& entry : list_of(field, item, "a list for every token")) {
          std::conditional_t<kAreIds, int64_t, double> value = 0;
          bool is_good = entry.get(value);
          if constexpr (kAreIds)
            is_good = is_good && value >= 0 && value <= std::numeric_limits<int32_t>::max();
          if (!is_good) [[unlikely]]
            throw_field(field, kAreIds ? "token ids" : "numbers",
                        fmt::format("{} for token {}", entry.described(), sizes.size()));
          values.push_back(static_cast<T>(value));
        }
      }
      const size_t size = values.size() - begin;
      if (size > 0 && topk_ > 0 && size != topk_)
        throw_field(field, fmt::format("{} for every token that has any", topk_),
                    fmt::format("{} for token {}", size, sizes.size()));
      if (topk_ == 0 && size > 0) {
        topk_ = size;
        values.insert(values.begin(), sizes.size() * size, absent);
      }
      if (size == 0) values.resize(begin + topk_, absent);
      sizes.push_back(size);
    }
    check_size(name, sizes.size());
  }

  void read_routes(size_t name) {
    size_t token = 0;
    for (const Element& item : list_of(kRoutes, elements_[name], "a list with the routes of every token")) {
      read_token_routes(item, token);
      ++token;
    }
    check_size(name, token);
    if (kept_route_shape_.experts > 0 && token > 0 && route_shape_ != kept_route_shape_)
      throw_field(kRoutes, kept_route_shape_.text() + ", as in earlier rows", route_shape_.text());
  }

  void read_token_routes(const Element& element, size_t token) {
    const auto routes = list_of(kRoutes, element, "a list of expert ids, or of such lists, for every token");
    const size_t size = routes.size();
    const bool nested = size > 0 && (*routes.begin()).list();
    RouteShape shape{nested ? size : 0, size};
    const size_t begin = row_.routed_experts.size();
    if (nested) {
      for (const Element& layer : routes)
        read_layer_routes(list_of(kRoutes, layer, "a list of expert ids for every layer"));
      shape.experts = (row_.routed_experts.size() - begin) / size;
      for (const Element& layer : routes) {
        if (layer.list()->size() == shape.experts) continue;
        throw_field(kRoutes, "the same number of experts in every layer",
                    fmt::format("different numbers at token {}", token));
      }
    } else {
      read_layer_routes(routes);
    }
    if (shape.experts == 0)
      throw_field(kRoutes, "at least one expert for every token", fmt::format("none at token {}", token));
    if (token == 0) route_shape_ = shape;
    if (shape != route_shape_)
      throw_field(kRoutes, route_shape_.text() + " for every token",
                  fmt::format("{} at token {}", shape.text(), token));
  }

  template <typename List>
  void read_layer_routes(const List& layer) {
    for (const Element& item : layer) {
      int64_t id = -1;
      if (!item.get(id) || id < 0 || id > std::numeric_limits<int32_t>::max())
        throw_field(kRoutes, "expert ids (integers >= 0)", item.described());
      row_.routed_experts.push_back(static_cast<int32_t>(id));
    }
  }

  /// Throws unless a list has as many entries as there are tokens.
  void check_size(size_t name, size_t size) const {
    if (tokens() > 0) check_length(kFieldNames[name].name, static_cast<int64_t>(size), tokens());
  }

  void check_together() {
    if (is_present(Field::kAdvantages) && is_present(Field::kAdvantage))
      throw_field("advantages", "either advantages or advantage", "both");
    if (is_present(Field::kReward) && is_present(Field::kTurnRewards))
      throw_field("turn_rewards", "either turn_rewards or reward", "both");
    check_topk_together();
    if (!is_present(Field::kLossMask) || !is_present(Field::kLossWeights)) return;
    const std::string_view mask_name = kFieldNames[first_name_of(Field::kLossMask)].name;
    if (mask_name == name_of(Field::kLossMask))
      throw_field(mask_name, "either loss_mask or loss_weights", "both");
    // A mask under another name may accompany weights that agree with it.
    other_mask_.clear();
    for (const double weight : row_.loss_weights) other_mask_.push_back(weight > 0);
    check_same_mask(mask_name, row_.loss_mask, name_of(Field::kLossWeights), other_mask_);
    row_.loss_mask.clear();
  }

  void check_topk_together() {
    if (!is_present(Field::kRefTopkIds) && !is_present(Field::kRefTopkLogprobs)) return;
    if (!is_present(Field::kRefTopkIds) || !is_present(Field::kRefTopkLogprobs))
      throw_field("ref_topk_ids", "ref_topk_ids and ref_topk_logprobs together",
                  is_present(Field::kRefTopkIds) ? "no ref_topk_logprobs" : "ref_topk_logprobs alone");
    const auto& [ids, logprobs] = topk_sizes_;
    for (size_t token = 0; token < ids.size(); ++token) {
      if (ids[token] != logprobs[token])
        throw_field("ref_topk_logprobs",
                    fmt::format("{} for token {}, as many as ref_topk_ids", ids[token], token),
                    std::to_string(logprobs[token]));
    }
    if (kept_topk_ > 0 && topk_ > 0 && topk_ != kept_topk_)
      throw_field("ref_topk_ids", fmt::format("{} ids for each token, as in earlier rows", kept_topk_),
                  std::to_string(topk_));
  }

  static auto list_of(std::string_view field, const Element& element, std::string_view what) {
    auto list = element.list();
    if (!list) throw_field(field, what, element.described());
    return *list;
  }
  /// "R at index I".
  static std::string at_index(const Element& element, size_t index) {
    return fmt::format("{} at index {}", element.described(), index);
  }

  /// The first name in kFieldNames under which the row has the field; kNumFieldNames if absent.
  size_t first_name_of(Field field) const { return first_name_[static_cast<size_t>(field)]; }
  bool is_present(Field field) const { return first_name_of(field) < kNumFieldNames; }
  int64_t tokens() const { return static_cast<int64_t>(row_.input_ids.size()); }

  /// The shape of the routes of one token. layers 0: a plain list of `experts` ids.
  struct RouteShape {
    size_t layers = 0;
    size_t experts = 0;
    bool operator==(const RouteShape&) const = default;
    std::string text() const {
      return layers > 0 ? fmt::format("{} layers of {} experts", layers, experts)
                        : fmt::format("{} experts", experts);
    }
  };

  static constexpr size_t kInputIdsName = 0;
  static_assert(kFieldNames[kInputIdsName].field == Field::kInputIds);
  static constexpr std::string_view kRoutes = name_of(Field::kRoutedExperts);
  static constexpr std::string_view kNumbersOfLoss = "numbers (null only for tokens without loss)";

  int64_t vocab_size_;
  bool recorded_;
  TrajectoryRow row_;
  std::array<Element, kNumFieldNames> elements_;
  std::bitset<kNumFieldNames> seen_;
  std::bitset<kNumFieldNames> present_;          // present and not null
  std::bitset<kNumFieldNames> number_ids_;       // are numbers
  std::array<size_t, kNumFields> first_name_{};  // see first_name_of
  std::vector<uint8_t> other_mask_;              // of a second name
  std::vector<double> other_values_;             // of a second name
  std::vector<int64_t> labels_;
  std::array<std::vector<size_t>, 2> topk_sizes_;  // of each token's ref_topk_ids and ref_topk_logprobs
  size_t topk_ = 0, kept_topk_ = 0;                // of the row, of the rows kept; 0: none yet
  RouteShape route_shape_;                         // of the row
  RouteShape kept_route_shape_;                    // of the rows kept; experts 0: none yet
};

}  // namespace espalier
