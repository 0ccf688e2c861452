#include "espalier/data/jsonl_reader.h"

#include <simdjson.h>

#include <array>
#include <bitset>
#include <limits>

#include "espalier/data/builder.h"
#include "espalier/data/line_reader.h"
#include "espalier/data/row_checks.h"
#include "espalier/data/row_report.h"

namespace espalier {
namespace {

namespace dom = simdjson::dom;

static_assert(LineReader::kPadding >= simdjson::SIMDJSON_PADDING);

enum Field {
  kInputIds,
  kLossMask,
  kLossWeights,
  kLogprobs,
  kRefLogprobs,
  kAdvantages,
  kAdvantage,
  kReward,
  kGroupId,
  kTrajectoryId,
  kPairId,
  kChosen,
  kRoutedExperts,
  kNumFields
};

constexpr std::array<std::string_view, kNumFields> kNames = {
    "input_ids", "loss_mask", "loss_weights",  "logprobs", "ref_logprobs", "advantages",    "advantage",
    "reward",    "group_id",  "trajectory_id", "pair_id",  "chosen",       "routed_experts"};

Field field_named(std::string_view name) {
  for (int field = 0; field < kNumFields; ++field) {
    if (kNames[field] == name) return static_cast<Field>(field);
  }
  return kNumFields;
}

/// What an element is, for an error message.
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

/// Where a bare NaN or Infinity stands, which Python writes and JSON does not have.
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

/// Parses lines into rows. Memory is reused from line to line.
class RowParser {
 public:
  explicit RowParser(int64_t vocab_size) : vocab_size_(vocab_size) {}

  /// The row on `line`, which LineReader::kPadding readable bytes follow. Types, ranges of integers and nulls
  /// are checked here, the rest by check_row. Valid until the next call.
  const TrajectoryRow& parse(std::string_view line);

  /// Says that the last row was kept: its shape of routed_experts holds for all rows to come.
  void keep() {
    if (!row_.routed_experts.empty()) kept_route_shape_ = route_shape_;
  }

 private:
  void read(Field field, dom::element element);
  void read_ids(dom::element element);
  void read_mask(dom::element element);
  void read_reals(Field field, dom::element element, std::vector<double>& values);
  void read_logprobs(Field field, dom::element element, std::vector<double>& values);
  void read_text(Field field, dom::element element, std::string& text);
  double read_real(Field field, dom::element element);
  void read_routes(dom::element element);
  void read_token_routes(dom::element element, size_t token);
  void read_layer_routes(dom::array layer);
  /// The list of `field`; throws unless it holds as many entries as there are tokens (0: not known yet).
  dom::array list(Field field, dom::element element, std::string_view what);
  void check_together();

  /// Routes of one token. layers 0: a plain list of `experts` ids.
  struct RouteShape {
    size_t layers = 0;
    size_t experts = 0;
    bool operator==(const RouteShape&) const = default;
    std::string text() const {
      return layers > 0 ? fmt::format("{} layers of {} experts", layers, experts)
                        : fmt::format("{} experts", experts);
    }
  };

  int64_t vocab_size_;
  dom::parser parser_;
  TrajectoryRow row_;
  std::bitset<kNumFields> seen_;
  std::bitset<kNumFields> given_;  // seen, and not null
  RouteShape route_shape_;         // of the row
  RouteShape kept_route_shape_;    // of the rows kept; experts 0: none yet
};

const TrajectoryRow& RowParser::parse(std::string_view line) {
  row_.clear();
  seen_.reset();
  given_.reset();
  route_shape_ = {};
  dom::element root;
  const auto error = parser_.parse(line.data(), line.size(), false).get(root);
  if (error != simdjson::SUCCESS) throw_malformed(line, error);
  dom::object object;
  ESPALIER_CHECK(root.get(object) == simdjson::SUCCESS, "expected a JSON object, received {}",
                 described(root));
  for (const auto [key, value] : object) {
    const Field field = field_named(key);
    if (field == kNumFields) continue;
    if (seen_[field]) throw_field(key, "one value", "the field twice");
    seen_.set(field);
    if (value.is_null()) continue;
    given_.set(field);
    read(field, value);
  }
  check_together();
  return row_;
}

void RowParser::check_together() {
  if (!given_[kInputIds])
    throw_field("input_ids", "a list of token ids", seen_[kInputIds] ? "null" : "a row without it");
  if (given_[kLossMask] && given_[kLossWeights])
    throw_field("loss_mask", "either loss_mask or loss_weights", "both");
  if (given_[kAdvantages] && given_[kAdvantage])
    throw_field("advantages", "either advantages or advantage", "both");
  // An empty list is a field of the wrong length, not a missing one.
  const int64_t tokens = static_cast<int64_t>(row_.input_ids.size());
  const std::array<std::pair<Field, size_t>, 6> lengths = {{{kLossMask, row_.loss_mask.size()},
                                                            {kLossWeights, row_.loss_weights.size()},
                                                            {kLogprobs, row_.logprobs.size()},
                                                            {kRefLogprobs, row_.ref_logprobs.size()},
                                                            {kAdvantages, row_.advantages.size()},
                                                            {kRoutedExperts, row_.routed_experts.size()}}};
  for (const auto& [field, length] : lengths) {
    if (!given_[field] || tokens == 0) continue;
    const size_t width =
        field == kRoutedExperts ? std::max<size_t>(route_shape_.layers, 1) * route_shape_.experts : 1;
    check_length(kNames[field], static_cast<int64_t>(length / std::max<size_t>(width, 1)), tokens);
  }
}

void RowParser::read(Field field, dom::element element) {
  switch (field) {
    case kInputIds:
      return read_ids(element);
    case kLossMask:
      return read_mask(element);
    case kLossWeights:
      return read_reals(field, element, row_.loss_weights);
    case kLogprobs:
      return read_logprobs(field, element, row_.logprobs);
    case kRefLogprobs:
      return read_logprobs(field, element, row_.ref_logprobs);
    case kAdvantages:
      return read_reals(field, element, row_.advantages);
    case kAdvantage:
      row_.advantage = read_real(field, element);
      return;
    case kReward:
      row_.reward = read_real(field, element);
      return;
    case kGroupId:
      return read_text(field, element, row_.group_id);
    case kTrajectoryId:
      return read_text(field, element, row_.trajectory_id);
    case kPairId:
      return read_text(field, element, row_.pair_id);
    case kChosen: {
      bool chosen = false;
      if (element.get(chosen) != simdjson::SUCCESS)
        throw_field(kNames[field], "true or false", described(element));
      row_.chosen = chosen;
      return;
    }
    case kRoutedExperts:
      return read_routes(element);
    case kNumFields:
      break;
  }
}

dom::array RowParser::list(Field field, dom::element element, std::string_view what) {
  dom::array array;
  if (element.get(array) != simdjson::SUCCESS) throw_field(kNames[field], what, described(element));
  return array;
}

void RowParser::read_ids(dom::element element) {
  for (const dom::element item : list(kInputIds, element, "a list of token ids")) {
    int64_t id = -1;
    const bool is_integer = item.get(id) == simdjson::SUCCESS;
    if (!is_integer || id < 0 || id > std::numeric_limits<int32_t>::max()) [[unlikely]] {
      const int64_t index = static_cast<int64_t>(row_.input_ids.size());
      if (is_integer || item.is<uint64_t>()) throw_token_id(described(item), index, vocab_size_);
      throw_field(kNames[kInputIds], "integers", fmt::format("{} at index {}", described(item), index));
    }
    row_.input_ids.push_back(static_cast<int32_t>(id));
  }
}

void RowParser::read_mask(dom::element element) {
  for (const dom::element item : list(kLossMask, element, "a list of 0 and 1")) {
    int64_t value = -1;
    bool truth = false;
    if (item.get(truth) == simdjson::SUCCESS) {
      value = truth;
    } else if (item.get(value) != simdjson::SUCCESS || (value != 0 && value != 1)) {
      throw_field(kNames[kLossMask], "0, 1, true or false",
                  fmt::format("{} at index {}", described(item), row_.loss_mask.size()));
    }
    row_.loss_mask.push_back(static_cast<uint8_t>(value));
  }
}

void RowParser::read_reals(Field field, dom::element element, std::vector<double>& values) {
  for (const dom::element item : list(field, element, "a list of numbers")) {
    double value = 0;
    if (item.get(value) != simdjson::SUCCESS) [[unlikely]]
      throw_field(kNames[field], "numbers", fmt::format("{} at index {}", described(item), values.size()));
    values.push_back(value);
  }
}

void RowParser::read_logprobs(Field field, dom::element element, std::vector<double>& values) {
  for (const dom::element item : list(field, element, "a list of log-probabilities")) {
    double value = 0;
    const bool first_is_null = values.empty() && item.is_null();
    if (!first_is_null && item.get(value) != simdjson::SUCCESS) [[unlikely]]
      throw_field(kNames[field], "numbers (null only for the first token)",
                  fmt::format("{} at index {}", described(item), values.size()));
    values.push_back(value);
  }
}

double RowParser::read_real(Field field, dom::element element) {
  double value = 0;
  if (element.get(value) != simdjson::SUCCESS) throw_field(kNames[field], "a number", described(element));
  return value;
}

void RowParser::read_text(Field field, dom::element element, std::string& text) {
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
    throw_field(kNames[field], "a string or an integer", described(element));
  }
}

void RowParser::read_routes(dom::element element) {
  size_t token = 0;
  for (const dom::element item : list(kRoutedExperts, element, "a list with the routes of every token")) {
    read_token_routes(item, token);
    ++token;
  }
  if (kept_route_shape_.experts > 0 && token > 0 && route_shape_ != kept_route_shape_)
    throw_field(kNames[kRoutedExperts], kept_route_shape_.text() + ", as in the rows before",
                route_shape_.text());
}

void RowParser::read_token_routes(dom::element element, size_t token) {
  const dom::array routes =
      list(kRoutedExperts, element, "a list of expert ids, or of such lists, for every token");
  const size_t size = routes.size();
  const bool nested = size > 0 && routes.at(0).is_array();
  RouteShape shape{nested ? size : 0, size};
  const size_t begin = row_.routed_experts.size();
  if (nested) {
    for (const dom::element layer : routes) {
      read_layer_routes(list(kRoutedExperts, layer, "a list of expert ids for every layer"));
    }
    shape.experts = (row_.routed_experts.size() - begin) / size;
    for (const dom::element layer : routes) {
      if (dom::array(layer).size() == shape.experts) continue;
      throw_field(kNames[kRoutedExperts], "as many experts in every layer",
                  fmt::format("other counts at token {}", token));
    }
  } else {
    read_layer_routes(routes);
  }
  if (shape.experts == 0)
    throw_field(kNames[kRoutedExperts], "at least one expert for every token",
                fmt::format("none at token {}", token));
  if (token == 0) route_shape_ = shape;
  if (shape != route_shape_)
    throw_field(kNames[kRoutedExperts], route_shape_.text() + " for every token",
                fmt::format("{} at token {}", shape.text(), token));
}

void RowParser::read_layer_routes(dom::array layer) {
  for (const dom::element item : layer) {
    int64_t id = -1;
    if (item.get(id) != simdjson::SUCCESS || id < 0 || id > std::numeric_limits<int32_t>::max())
      throw_field(kNames[kRoutedExperts], "expert ids (integers >= 0)", described(item));
    row_.routed_experts.push_back(static_cast<int32_t>(id));
  }
}

}  // namespace

Trajectories read_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report) {
  const std::string file = path.string();
  LineReader lines(path, options.max_line_bytes);
  RowParser parser(options.vocab_size);
  TrajectoriesBuilder builder;
  RowReport rows(options, report);
  std::string_view line;
  while (!rows.enough()) {
    const LineReader::Status status = lines.next(line);
    if (status == LineReader::Status::kEnd) break;
    rows.progress(lines.fraction());
    if (status == LineReader::Status::kTooLong) {
      rows.bad(fmt::format("{}:{}: expected a line of at most {} bytes, received a longer one", file,
                           lines.line_number(), options.max_line_bytes));
      continue;
    }
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    try {
      builder.append(parser.parse(line), options.vocab_size);
      parser.keep();
      rows.good();
    } catch (const InputError& error) {
      rows.bad(fmt::format("{}:{}: {}", file, lines.line_number(), error.what()));
    }
  }
  rows.finish(file);
  return builder.finish();
}

}  // namespace espalier
