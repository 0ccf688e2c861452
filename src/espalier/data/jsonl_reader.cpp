// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/reader.h"

#include <simdjson.h>

#include <array>
#include <bitset>
#include <limits>
#include <type_traits>
#include <utility>

#include "espalier/base/printable.h"
#include "espalier/data/builder.h"
#include "espalier/data/fields.h"
#include "espalier/data/foreign_rows.h"
#include "espalier/data/large_numbers.h"
#include "espalier/data/line_reader.h"
#include "espalier/data/row_checks.h"
#include "espalier/data/row_report.h"

namespace espalier {
namespace {

namespace dom = simdjson::dom;

static_assert(LineReader::kPadding >= simdjson::SIMDJSON_PADDING);

/// A description of an element for error messages.
std::string described(dom::element element) {
  switch (element.type()) {
    case dom::element_type::ARRAY:
      return fmt::format("a list of {}", dom::array(element).size());
    case dom::element_type::OBJECT:
      return "an object";
    default:
      return shortened(simdjson::minify(element));
  }
}

/// Finds a bare NaN or Infinity, which Python writes although JSON does not allow it.
struct BareNumber {
  std::string field;  // the last key of the outermost object
  std::string_view text;
};

std::optional<BareNumber> find_bare_number(std::string_view line) {
  BareNumber found;
  int depth = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"') {
      const size_t begin = ++i;
      while (i < line.size() && line[i] != '"') i += line[i] == '\\' ? 2 : 1;
      const size_t next = line.find_first_not_of(" \t", i + 1);
      if (depth == 1 && next < line.size() && line[next] == ':') found.field = line.substr(begin, i - begin);
    } else if (line[i] == '{' || line[i] == '[') {
      ++depth;
    } else if (line[i] == '}' || line[i] == ']') {
      --depth;
    } else {
      for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
        if (!line.substr(i).starts_with(word)) continue;
        found.text = word;
        return found;
      }
    }
  }
  return std::nullopt;
}

[[noreturn]] void throw_malformed(std::string_view line, simdjson::error_code error) {
  if (const auto bare = find_bare_number(line))
    throw_field(shortened(bare->field), "finite numbers (JSON has no NaN and no Infinity)", bare->text);
  throw InputError(fmt::format("expected a JSON object, received `{}` (not JSON: {})", shortened(line),
                               simdjson::error_message(error)));
}

dom::array list_of(std::string_view field, dom::element element, std::string_view what) {
  dom::array array;
  if (element.get(array) != simdjson::SUCCESS) throw_field(field, what, described(element));
  return array;
}

/// Whether a list that exporters add to every row is redundant: a mask without padding, or positions from 0.
bool is_redundant(std::string_view name, dom::array array) {
  const bool is_mask = name == "attention_mask";
  if (!is_mask && name != "position_ids") return false;
  int64_t expected = is_mask ? 1 : 0;
  for (const dom::element item : array) {
    int64_t value = -1;
    bool truth = false;
    if (item.get(truth) == simdjson::SUCCESS) {
      value = truth;
    } else if (item.get(value) != simdjson::SUCCESS) {
      return false;
    }
    if (value != expected) return false;
    if (!is_mask) ++expected;
  }
  return true;
}

constexpr size_t kInputIdsName = 0;
static_assert(kFieldNames[kInputIdsName].field == Field::kInputIds);
constexpr std::string_view kRoutes = name_of(Field::kRoutedExperts);

/// Parses lines into rows. Reuses its memory from line to line.
class RowParser {
 public:
  /// `file` is used in messages.
  RowParser(const std::filesystem::path& file, int64_t vocab_size, FieldTally* tally)
      : file_(file), vocab_size_(vocab_size), tally_(*tally) {}

  /// Parses `line`, which must be followed by LineReader::kPadding readable bytes. Checks types, integer
  /// ranges, nulls and that several names of one field agree; check_row checks the rest. The result is valid
  /// until the next call.
  const TrajectoryRow& parse(std::string_view line);

  /// Counts the fields of the last row as good. All later rows must have its shape of routed_experts.
  void keep();

 private:
  dom::object parse_object(std::string_view line);
  [[noreturn]] void throw_without_ids(std::string_view line);
  void read(size_t name);
  void read_ids();
  void read_mask(size_t name, std::vector<uint8_t>& mask);
  void read_labels(std::vector<uint8_t>& mask);
  void read_reals(size_t name, std::vector<double>& values);
  void read_logprobs(size_t name, std::vector<double>& values);
  /// Whether a token carries loss. Valid for fields after the masks and weights in kFieldNames.
  bool carries_loss(size_t token) const;
  void read_text(size_t name, std::string& text);
  double read_real(size_t name);
  template <typename T>
  void read_topk(size_t name, std::vector<T>& values, T absent);
  void read_routes(size_t name);
  void read_token_routes(dom::element element, size_t token);
  void read_layer_routes(dom::array layer);
  /// Throws unless a list has as many entries as there are tokens.
  void check_size(size_t name, size_t size) const;
  void check_together();
  void check_topk_together();

  /// The first name in kFieldNames under which the row has the field; kNumFieldNames if absent.
  size_t first_name_of(Field field) const { return first_name_[static_cast<size_t>(field)]; }
  bool given(Field field) const { return first_name_of(field) < kNumFieldNames; }
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

  std::filesystem::path file_;
  int64_t vocab_size_;
  FieldTally& tally_;
  dom::parser parser_;
  TrajectoryRow row_;
  std::array<dom::element, kNumFieldNames> elements_;
  std::bitset<kNumFieldNames> seen_;
  std::bitset<kNumFieldNames> given_;            // present and not null
  std::bitset<kNumFieldNames> number_ids_;       // given as a number
  std::array<size_t, kNumFields> first_name_{};  // see first_name_of
  std::vector<std::pair<std::string_view, dom::element>> unknown_;
  std::vector<uint8_t> other_mask_;   // of a second name
  std::vector<double> other_values_;  // of a second name
  std::vector<int64_t> labels_;
  std::array<std::vector<size_t>, 2> topk_sizes_;  // of each token's ref_topk_ids and ref_topk_logprobs
  size_t topk_ = 0, kept_topk_ = 0;                // of the row, of the rows kept; 0: none yet
  RouteShape route_shape_;                         // of the row
  RouteShape kept_route_shape_;                    // of the rows kept; experts 0: none yet
};

dom::object RowParser::parse_object(std::string_view line) {
  dom::element root;
  auto error = parser_.parse(line.data(), line.size(), false).get(root);
  if (error != simdjson::SUCCESS) {
    const std::optional<std::string> readable = without_large_numbers(line);
    if (readable) error = parser_.parse(*readable).get(root);
  }
  dom::object object;
  if (error == simdjson::SUCCESS && root.get(object) == simdjson::SUCCESS) return object;
  if (const std::string foreign = describe_foreign_line(line, file_); !foreign.empty())
    throw InputError("expected a JSON object, received " + foreign);
  if (error != simdjson::SUCCESS) throw_malformed(line, error);
  throw InputError("expected a JSON object, received " + described(root));
}

const TrajectoryRow& RowParser::parse(std::string_view line) {
  row_.clear();
  seen_.reset();
  given_.reset();
  number_ids_.reset();
  unknown_.clear();
  first_name_.fill(kNumFieldNames);
  route_shape_ = {};
  topk_ = 0;
  for (const auto [key, value] : parse_object(line)) {
    const std::optional<size_t> name = find_field_name(key);
    if (!name) {
      if (!value.is_null()) unknown_.emplace_back(key, value);
      continue;
    }
    if (seen_[*name]) throw_field(key, "one value", "the field twice");
    seen_.set(*name);
    if (value.is_null()) continue;
    given_.set(*name);
    elements_[*name] = value;
  }
  if (!given_[kInputIdsName]) throw_without_ids(line);
  // input_ids come first in the table, so the other fields can be compared with them.
  for (size_t name = 0; name < kNumFieldNames; ++name) {
    if (given_[name]) read(name);
  }
  check_together();
  return row_;
}

void RowParser::throw_without_ids(std::string_view line) {
  std::vector<std::string_view> names;
  for (const auto [key, value] : parse_object(line)) names.push_back(key);
  throw_field("input_ids", "a list of token ids",
              seen_[kInputIdsName] ? "null" : describe_foreign_row(names, file_));
}

void RowParser::keep() {
  if (!row_.routed_experts.empty()) kept_route_shape_ = route_shape_;
  if (topk_ > 0) kept_topk_ = topk_;
  for (size_t name = 0; name < kNumFieldNames; ++name) {
    tally_.rows[name] += given_[name];
    tally_.number_rows[name] += number_ids_[name];
  }
  tally_.tokens += tokens();
  if (!row_.loss_weights.empty()) {
    tally_.loss_tokens += count_loss_tokens(std::span<const double>(row_.loss_weights));
  } else if (!row_.loss_mask.empty()) {
    tally_.loss_tokens += count_loss_tokens(std::span<const uint8_t>(row_.loss_mask));
  } else {
    tally_.loss_tokens += tokens() - 1;
    ++tally_.rows_without_mask;
  }
  for (const auto& [name, value] : unknown_) {
    dom::array array;
    const bool per_token = value.get(array) == simdjson::SUCCESS &&
                           static_cast<int64_t>(array.size()) == tokens() && !is_redundant(name, array);
    tally_.ignore(name, 1, per_token);
  }
}

void RowParser::check_together() {
  if (given(Field::kAdvantages) && given(Field::kAdvantage))
    throw_field("advantages", "either advantages or advantage", "both");
  if (given(Field::kReward) && given(Field::kTurnRewards))
    throw_field("turn_rewards", "either turn_rewards or reward", "both");
  check_topk_together();
  if (!given(Field::kLossMask) || !given(Field::kLossWeights)) return;
  const std::string_view mask_name = kFieldNames[first_name_of(Field::kLossMask)].name;
  if (mask_name == name_of(Field::kLossMask))
    throw_field(mask_name, "either loss_mask or loss_weights", "both");
  // A mask under another name may accompany weights that agree with it.
  other_mask_.clear();
  for (const double weight : row_.loss_weights) other_mask_.push_back(weight > 0);
  check_same_mask(mask_name, row_.loss_mask, name_of(Field::kLossWeights), other_mask_);
  row_.loss_mask.clear();
}

void RowParser::check_topk_together() {
  if (!given(Field::kRefTopkIds) && !given(Field::kRefTopkLogprobs)) return;
  if (!given(Field::kRefTopkIds) || !given(Field::kRefTopkLogprobs))
    throw_field("ref_topk_ids", "ref_topk_ids and ref_topk_logprobs together",
                given(Field::kRefTopkIds) ? "no ref_topk_logprobs" : "ref_topk_logprobs alone");
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

void RowParser::read(size_t name) {
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
      row_.advantage = read_real(name);
      return;
    case Field::kReward:
      row_.reward = read_real(name);
      return;
    case Field::kTemperature:
      row_.temperature = read_real(name);
      return;
    case Field::kTopK:
      row_.top_k = read_real(name);
      return;
    case Field::kTopP:
      row_.top_p = read_real(name);
      return;
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
      if (elements_[name].get(chosen) != simdjson::SUCCESS)
        throw_field(kFieldNames[name].name, "true or false", described(elements_[name]));
      row_.chosen = chosen;
      return;
    }
    case Field::kRoutedExperts:
      return read_routes(name);
  }
}

void RowParser::check_size(size_t name, size_t size) const {
  if (tokens() > 0) check_length(kFieldNames[name].name, static_cast<int64_t>(size), tokens());
}

void RowParser::read_ids() {
  for (const dom::element item : list_of("input_ids", elements_[kInputIdsName], "a list of token ids")) {
    int64_t id = -1;
    const bool is_integer = item.get(id) == simdjson::SUCCESS;
    if (!is_integer || id < 0 || id > std::numeric_limits<int32_t>::max()) [[unlikely]] {
      const int64_t index = tokens();
      if (is_integer || item.is<uint64_t>()) throw_token_id(described(item), index, vocab_size_);
      throw_field("input_ids", "integers", fmt::format("{} at index {}", described(item), index));
    }
    row_.input_ids.push_back(static_cast<int32_t>(id));
  }
}

void RowParser::read_mask(size_t name, std::vector<uint8_t>& mask) {
  const std::string_view field = kFieldNames[name].name;
  mask.clear();
  if (field == kLabels) {
    read_labels(mask);
  } else {
    for (const dom::element item : list_of(field, elements_[name], "a list of 0 and 1")) {
      int64_t value = -1;
      bool truth = false;
      if (item.get(truth) == simdjson::SUCCESS) {
        value = truth;
      } else if (item.get(value) != simdjson::SUCCESS || (value != 0 && value != 1)) {
        throw_field(field, "0, 1, true or false",
                    fmt::format("{} at index {}", described(item), mask.size()));
      }
      mask.push_back(static_cast<uint8_t>(value));
    }
  }
  check_size(name, mask.size());
}

void RowParser::read_labels(std::vector<uint8_t>& mask) {
  const dom::array labels =
      list_of(kLabels, elements_[*find_field_name(kLabels)], "a list of token ids and -100");
  labels_.clear();
  for (const dom::element item : labels) {
    int64_t label = 0;
    if (item.get(label) != simdjson::SUCCESS) [[unlikely]]
      throw_field(kLabels, "integers", fmt::format("{} at index {}", described(item), labels_.size()));
    labels_.push_back(label);
  }
  check_size(*find_field_name(kLabels), labels_.size());
  check_labels<int64_t>(labels_, row_.input_ids);
  for (const int64_t label : labels_) mask.push_back(label != kNoLabel);
}

void RowParser::read_reals(size_t name, std::vector<double>& values) {
  const std::string_view field = kFieldNames[name].name;
  for (const dom::element item : list_of(field, elements_[name], "a list of numbers")) {
    double value = 0;
    if (item.get(value) != simdjson::SUCCESS) [[unlikely]]
      throw_field(field, "numbers", fmt::format("{} at index {}", described(item), values.size()));
    values.push_back(value);
  }
  if (kFieldNames[name].field != Field::kTurnRewards) check_size(name, values.size());
}

void RowParser::read_logprobs(size_t name, std::vector<double>& values) {
  const std::string_view field = kFieldNames[name].name;
  values.clear();
  for (const dom::element item : list_of(field, elements_[name], "a list of log-probabilities")) {
    double value = 0;
    const bool is_unscored = item.is_null() && !carries_loss(values.size());
    if (!is_unscored && item.get(value) != simdjson::SUCCESS) [[unlikely]]
      throw_field(field, "numbers (null only for tokens without loss)",
                  fmt::format("{} at index {}", described(item), values.size()));
    values.push_back(value);
  }
  check_size(name, values.size());
  // Faults of an alias name the alias; check_row checks the field's own name.
  if (field != name_of(kFieldNames[name].field)) check_logprobs(field, std::span<const double>(values));
}

bool RowParser::carries_loss(size_t token) const {
  if (token == 0) return false;
  if (token < row_.loss_weights.size()) return row_.loss_weights[token] > 0;
  return token >= row_.loss_mask.size() || row_.loss_mask[token] != 0;
}

double RowParser::read_real(size_t name) {
  double value = 0;
  if (elements_[name].get(value) != simdjson::SUCCESS)
    throw_field(kFieldNames[name].name, "a number", described(elements_[name]));
  return value;
}

/// Reads one list per token. Non-empty lists must have equal lengths; null is an empty list.
template <typename T>
void RowParser::read_topk(size_t name, std::vector<T>& values, T absent) {
  const std::string_view field = kFieldNames[name].name;
  constexpr bool kAreIds = std::is_same_v<T, int32_t>;
  std::vector<size_t>& sizes = topk_sizes_[kAreIds ? 0 : 1];
  sizes.clear();
  for (const dom::element item : list_of(field, elements_[name], "a list for every token")) {
    const size_t begin = values.size();
    if (!item.is_null()) {
      for (const dom::element entry : list_of(field, item, "a list for every token")) {
        std::conditional_t<kAreIds, int64_t, double> value = 0;
        bool is_good = entry.get(value) == simdjson::SUCCESS;
        if constexpr (kAreIds)
          is_good = is_good && value >= 0 && value <= std::numeric_limits<int32_t>::max();
        if (!is_good) [[unlikely]]
          throw_field(field, kAreIds ? "token ids" : "numbers",
                      fmt::format("{} for token {}", described(entry), sizes.size()));
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

void RowParser::read_text(size_t name, std::string& text) {
  const dom::element element = elements_[name];
  std::string_view view;
  int64_t integer = 0;
  uint64_t large = 0;
  if (element.get(view) == simdjson::SUCCESS) {
    text = view;
  } else if (element.get(integer) == simdjson::SUCCESS) {
    text = std::to_string(integer);
  } else if (element.get(large) == simdjson::SUCCESS) {
    text = std::to_string(large);
  } else {
    throw_field(kFieldNames[name].name, "a string or an integer", described(element));
  }
  number_ids_[name] = !element.is_string();
}

void RowParser::read_routes(size_t name) {
  size_t token = 0;
  for (const dom::element item : list_of(kRoutes, elements_[name], "a list with the routes of every token")) {
    read_token_routes(item, token);
    ++token;
  }
  check_size(name, token);
  if (kept_route_shape_.experts > 0 && token > 0 && route_shape_ != kept_route_shape_)
    throw_field(kRoutes, kept_route_shape_.text() + ", as in earlier rows", route_shape_.text());
}

void RowParser::read_token_routes(dom::element element, size_t token) {
  const dom::array routes =
      list_of(kRoutes, element, "a list of expert ids, or of such lists, for every token");
  const size_t size = routes.size();
  const bool nested = size > 0 && routes.at(0).is_array();
  RouteShape shape{nested ? size : 0, size};
  const size_t begin = row_.routed_experts.size();
  if (nested) {
    for (const dom::element layer : routes)
      read_layer_routes(list_of(kRoutes, layer, "a list of expert ids for every layer"));
    shape.experts = (row_.routed_experts.size() - begin) / size;
    for (const dom::element layer : routes) {
      if (dom::array(layer).size() == shape.experts) continue;
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

void RowParser::read_layer_routes(dom::array layer) {
  for (const dom::element item : layer) {
    int64_t id = -1;
    if (item.get(id) != simdjson::SUCCESS || id < 0 || id > std::numeric_limits<int32_t>::max())
      throw_field(kRoutes, "expert ids (integers >= 0)", described(item));
    row_.routed_experts.push_back(static_cast<int32_t>(id));
  }
}

}  // namespace

Trajectories read_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report) {
  TrajectoriesBuilder builder(options.store);
  append_jsonl(path, options, report, &builder);
  return builder.finish();
}

void append_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report,
                  TrajectoriesBuilder* builder) {
  const std::string file = path.string();
  // If bad rows are errors, the rest of a line that is too long is not read.
  constexpr int64_t kMostPassedOver = int64_t{1} << 34;
  refuse_foreign_file(path);
  LineReader lines(path, options.max_line_bytes, options.skip_bad_rows ? kMostPassedOver : 0);
  RowReport rows(options, report);
  RowParser parser(path, options.vocab_size, &rows.fields());
  lines.on_read = [&] { rows.progress(lines.fraction(), lines.bytes_read()); };
  std::string_view line;
  while (!rows.enough()) {
    const LineReader::Status status = lines.next(line);
    if (status == LineReader::Status::kEnd) break;
    if (status == LineReader::Status::kTooLong) {
      rows.bad(fmt::format("{}:{}: expected a line of at most {} bytes, received a longer one", file,
                           lines.line_number(), options.max_line_bytes));
      continue;
    }
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const TrajectoryRow* row = nullptr;
    try {
      row = &parser.parse(line);
      builder->check(*row, options.vocab_size);
    } catch (const InputError& error) {
      rows.bad(fmt::format("{}:{}: {}", file, lines.line_number(), error.what()));
      continue;
    }
    builder->append_checked(*row);  // a file that cannot be written is no fault of the row
    parser.keep();
    rows.good();
  }
  rows.finish(file);
}

}  // namespace espalier
