// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/packed.h"

#include <simdjson.h>

#include <algorithm>
#include <cstring>

#include "espalier/base/printable.h"
#include "espalier/base/safetensors.h"
#include "espalier/data/builder.h"
#include "espalier/data/fields.h"
#include "espalier/data/row_checks.h"
#include "espalier/data/row_report.h"

namespace espalier {
namespace {

bool has_dtype(const TensorView& tensor, const std::string& dtype) {
  return tensor.dtype == dtype || (dtype == "U8" && tensor.dtype == "BOOL");
}

/// The names of a file's columns, and columns that repeat another one under a second name or in another form;
/// they must agree with it.
struct SecondNames {
  struct Mask {
    std::string_view name;
    Column<uint8_t> values;
  };
  struct Reals {
    std::string_view name, first_name;
    Optional<RealColumn> values;
  };
  // The names of the columns in the file; empty if it has none.
  std::string_view mask_name, logprobs_name, ref_logprobs_name;
  std::vector<Mask> masks;
  Column<int64_t> labels;  // as in the file; empty if it has none
  std::vector<Reals> logprobs, ref_logprobs;
};

/// Whether a tensor belongs to a column of the format: offsets, X, X.present, X.offsets.
bool is_part_of_format(std::string_view name) {
  if (name == "offsets") return true;
  for (const std::string_view suffix : {".present", ".offsets"}) {
    if (name.ends_with(suffix)) name.remove_suffix(suffix.size());
  }
  return find_field_name(name).has_value();
}

/// Converts a file's tensors to columns. A fault throws InputError "FILE: field `F`: ...".
class ColumnReader {
 public:
  explicit ColumnReader(const std::filesystem::path& path) : file_(path) {}

  Trajectories read() {
    Trajectories result;
    const TensorView& ids = required("input_ids");
    if (ids.shape.size() != 1) fail(ids.name, "one dimension", std::to_string(ids.shape.size()));
    result.offsets = offsets(required("offsets"));
    result.input_ids = column<int32_t>(ids);
    rows_ = result.num_rows();
    tokens_ = result.num_tokens();
    if (result.offsets[rows_] != tokens_)
      fail("offsets", fmt::format("{} (the length of input_ids) at the end", tokens_),
           std::to_string(result.offsets[rows_]));
    result.loss_weights = weights();
    result.logprobs = first_reals(Field::kLogprobs, &second_.logprobs_name, &second_.logprobs);
    result.ref_logprobs = first_reals(Field::kRefLogprobs, &second_.ref_logprobs_name, &second_.ref_logprobs);
    result.advantages = optional_reals("advantages", tokens_);
    for (const RowReal& real : kRowReals) result.*real.column = optional_reals(real.name, rows_);
    read_turn_rewards(result);
    read_ref_topk(result);
    if (const TensorView* chosen = file_.find("chosen")) {
      check_shape(*chosen, {rows_});
      result.chosen = {column<uint8_t>(*chosen), present("chosen")};
    }
    for (const auto& [name, column] : kRowTexts) result.*column = texts(name);
    read_routes(result);
    result.release = [file = file_.mapping()] { file->release(); };
    return result;
  }

  const SecondNames& second_names() const { return second_; }
  void check_whole() const { file_.mapping()->check_whole(); }

  /// Adds the names of all tensors to the tally of a file with `rows` good rows.
  void tally(int64_t rows, FieldTally* tally) const {
    for (const TensorView& tensor : file_.tensors()) {
      if (const std::optional<size_t> name = find_field_name(tensor.name)) {
        tally->rows[*name] += rows;
      } else if (!is_part_of_format(tensor.name)) {
        const bool per_token = !tensor.shape.empty() && tensor.shape[0] == tokens_ && tokens_ != rows_;
        tally->ignore(tensor.name, rows, per_token ? rows : 0);
      }
    }
  }

 private:
  [[noreturn]] void fail(const std::string& name, std::string_view expected,
                         std::string_view received) const {
    throw InputError(fmt::format("{}: field `{}`: expected {}, received {}", file_.path().string(), name,
                                 expected, received));
  }

  const TensorView& required(const std::string& name) const {
    const TensorView* tensor = file_.find(name);
    if (tensor == nullptr) fail(name, "a tensor of this name", "a file without it");
    return *tensor;
  }

  void check_shape(const TensorView& tensor, const std::vector<int64_t>& shape) const {
    if (tensor.shape != shape)
      fail(tensor.name, fmt::format("shape [{}]", fmt::join(shape, ", ")),
           fmt::format("[{}]", fmt::join(tensor.shape, ", ")));
  }

  template <typename T>
  Column<T> column(const TensorView& tensor) const {
    if (!has_dtype(tensor, dtype_of<T>()))
      fail(tensor.name, fmt::format("dtype {}", dtype_of<T>()), tensor.dtype);
    const size_t size = tensor.bytes.size() / sizeof(T);
    if (reinterpret_cast<uintptr_t>(tensor.bytes.data()) % alignof(T) != 0) {
      std::vector<T> copy(size);
      std::memcpy(copy.data(), tensor.bytes.data(), tensor.bytes.size());
      return Column<T>(std::move(copy));
    }
    return Column<T>(std::span(reinterpret_cast<const T*>(tensor.bytes.data()), size), file_.mapping());
  }

  Column<int64_t> offsets(const TensorView& tensor) const {
    if (tensor.shape.size() != 1 || tensor.shape[0] < 1)
      fail(tensor.name, "shape [rows + 1]", fmt::format("[{}]", fmt::join(tensor.shape, ", ")));
    // Copied, so that the offsets stay valid if the file is truncated while it is read.
    const Column<int64_t> mapped = column<int64_t>(tensor);
    Column<int64_t> values = std::vector<int64_t>(mapped.span().begin(), mapped.span().end());
    if (values[0] != 0) fail(tensor.name, "0 at index 0", std::to_string(values[0]));
    for (int64_t i = 1; i < values.size(); ++i) {
      if (values[i] < values[i - 1])
        fail(tensor.name, "ascending values",
             fmt::format("{} after {} at index {}", values[i], values[i - 1], i));
    }
    return values;
  }

  RealColumn reals(const TensorView& tensor) const {
    if (tensor.dtype == "F32") return column<float>(tensor);
    if (tensor.dtype == "F64") return column<double>(tensor);
    fail(tensor.name, "dtype F32 or F64", tensor.dtype);
  }

  Column<int64_t> integers(const TensorView& tensor) const {
    if (tensor.dtype == "I64") return column<int64_t>(tensor);
    if (tensor.dtype != "I32") fail(tensor.name, "dtype I64 or I32", tensor.dtype);
    const Column<int32_t> values = column<int32_t>(tensor);
    return std::vector<int64_t>(values.span().begin(), values.span().end());
  }

  /// A mask under any of its names. Other programs often store masks as 32 or 64 bits.
  Column<uint8_t> mask(const TensorView& tensor) {
    check_shape(tensor, {tokens_});
    if (tensor.name == name_of(Field::kLossMask) || has_dtype(tensor, "U8")) return column<uint8_t>(tensor);
    const Column<int64_t> values = integers(tensor);
    const bool are_labels = tensor.name == kLabels;
    std::vector<uint8_t> bytes(static_cast<size_t>(tokens_));
    for (int64_t i = 0; i < tokens_; ++i) {
      // Values other than 0 and 1 become 2, which the check of the row reports.
      bytes[i] = are_labels ? values[i] != kNoLabel : values[i] == 0 || values[i] == 1 ? values[i] : 2;
    }
    if (are_labels) second_.labels = values;
    return Column<uint8_t>(std::move(bytes));
  }

  RealColumn weights() {
    const TensorView* weights = file_.find(std::string(name_of(Field::kLossWeights)));
    if (weights != nullptr && file_.find(std::string(name_of(Field::kLossMask))) != nullptr)
      fail("loss_mask", "either loss_mask or loss_weights", "both");
    for (const FieldName& entry : kFieldNames) {
      const TensorView* tensor =
          entry.field == Field::kLossMask ? file_.find(std::string(entry.name)) : nullptr;
      if (tensor != nullptr) second_.masks.push_back({entry.name, mask(*tensor)});
    }
    if (weights != nullptr) {
      second_.mask_name = name_of(Field::kLossWeights);
      check_shape(*weights, {tokens_});
      return reals(*weights);
    }
    if (second_.masks.empty()) return Column<uint8_t>(std::vector<uint8_t>(static_cast<size_t>(tokens_), 1));
    second_.mask_name = second_.masks.front().name;
    const Column<uint8_t> first = second_.masks.front().values;
    second_.masks.erase(second_.masks.begin());
    return first;
  }

  Column<uint8_t> present(const std::string& name) const {
    const TensorView* tensor = file_.find(name + ".present");
    if (tensor == nullptr) return {};
    check_shape(*tensor, {rows_});
    Column<uint8_t> values = column<uint8_t>(*tensor);
    for (int64_t r = 0; r < rows_; ++r) {
      if (values[r] > 1) fail(tensor->name, "0 or 1", fmt::format("{} at index {}", values[r], r));
    }
    return values;
  }

  Optional<RealColumn> optional_reals(const std::string& name, int64_t size) const {
    const TensorView* tensor = file_.find(name);
    if (tensor == nullptr) return {};
    check_shape(*tensor, {size});
    return {reals(*tensor), present(name)};
  }

  /// The column of a field under the first of its names in the file; columns of its other names go to
  /// `others`.
  Optional<RealColumn> first_reals(Field field, std::string_view* first_name,
                                   std::vector<SecondNames::Reals>* others) const {
    Optional<RealColumn> first;
    for (const FieldName& entry : kFieldNames) {
      if (entry.field != field || file_.find(std::string(entry.name)) == nullptr) continue;
      Optional<RealColumn> column = optional_reals(std::string(entry.name), tokens_);
      if (first_name->empty()) {
        *first_name = entry.name;
        first = std::move(column);
      } else {
        others->push_back({entry.name, *first_name, std::move(column)});
      }
    }
    return first;
  }

  std::vector<std::string> texts(const std::string& name) const {
    const TensorView* tensor = file_.find(name);
    if (tensor == nullptr) return {};
    if (tensor->shape.size() != 1) fail(name, "one dimension", std::to_string(tensor->shape.size()));
    const Column<uint8_t> bytes = column<uint8_t>(*tensor);
    const TensorView& ends = required(name + ".offsets");
    check_shape(ends, {rows_ + 1});
    const Column<int64_t> begin = offsets(ends);
    if (begin[rows_] != bytes.size())
      fail(ends.name, fmt::format("{} (the bytes of {}) at the end", bytes.size(), name),
           std::to_string(begin[rows_]));
    std::vector<std::string> result;
    result.reserve(static_cast<size_t>(rows_));
    for (int64_t r = 0; r < rows_; ++r) {
      const std::span<const uint8_t> text = bytes.span().subspan(begin[r], begin[r + 1] - begin[r]);
      result.emplace_back(text.begin(), text.end());
    }
    return result;
  }

  void read_routes(Trajectories& result) const {
    const TensorView* tensor = file_.find("routed_experts");
    if (tensor == nullptr) return;
    if (tensor->shape.size() != 2 || tensor->shape[0] != tokens_ || tensor->shape[1] < 1)
      fail(tensor->name, fmt::format("shape [{}, routes per token]", tokens_),
           fmt::format("[{}]", fmt::join(tensor->shape, ", ")));
    result.routed_experts = column<int32_t>(*tensor);
    result.routes_per_token = tensor->shape[1];
  }

  void read_turn_rewards(Trajectories& result) const {
    const TensorView* tensor = file_.find("turn_rewards");
    if (tensor == nullptr) return;
    if (tensor->shape.size() != 1) fail(tensor->name, "one dimension", std::to_string(tensor->shape.size()));
    result.turn_rewards = reals(*tensor);
    const TensorView& ends = required("turn_rewards.offsets");
    check_shape(ends, {rows_ + 1});
    result.turn_reward_offsets = offsets(ends);
    if (result.turn_reward_offsets[rows_] != result.turn_rewards.size())
      fail(ends.name, fmt::format("{} (the length of turn_rewards) at the end", result.turn_rewards.size()),
           std::to_string(result.turn_reward_offsets[rows_]));
  }

  void read_ref_topk(Trajectories& result) const {
    const TensorView* tensor = file_.find("ref_topk_ids");
    if (tensor == nullptr) {
      if (file_.find("ref_topk_logprobs") != nullptr) required("ref_topk_ids");
      return;
    }
    if (tensor->shape.size() != 2 || tensor->shape[0] != tokens_ || tensor->shape[1] < 1)
      fail(tensor->name, fmt::format("shape [{}, ids per token]", tokens_),
           fmt::format("[{}]", fmt::join(tensor->shape, ", ")));
    result.ref_topk_ids = column<int32_t>(*tensor);
    result.ref_topk = tensor->shape[1];
    const TensorView& logprobs = required("ref_topk_logprobs");
    check_shape(logprobs, tensor->shape);
    result.ref_topk_logprobs = reals(logprobs);
  }

  SafetensorsFile file_;
  SecondNames second_;
  int64_t rows_ = 0;
  int64_t tokens_ = 0;
};

/// Calls check(values) with the values of a real column for one row, in the column's own type.
template <typename Check>
void visit_reals(const RealColumn& column, int64_t begin, int64_t end, Check check) {
  std::visit([&](const auto& values) { check(values.span().subspan(begin, end - begin)); }, column.values());
}

struct RowRange {
  int64_t row, begin, end;
};

template <typename Check>
void check_optional(std::string_view field, const Optional<RealColumn>& column, RowRange range, Check check) {
  if (!column.any()) return;
  const bool has = column.has(range.row);
  visit_reals(column.values, range.begin, range.end, [&](auto values) {
    if (has) {
      check(values);
    } else {
      check_absent(field, values);
    }
  });
}

void check_mask(std::string_view field, std::span<const uint8_t> values) {
  check_values(field, values, "0 or 1", [](uint8_t value) { return value <= 1; });
}

void check_text(std::string_view field, const std::vector<std::string>& column, int64_t r) {
  if (column.empty()) return;
  if (!simdjson::validate_utf8(column[r])) throw_field(field, "UTF-8 text", "`" + shortened(column[r]) + "`");
}

void check_row_routes(const Trajectories& t, RowRange range) {
  const int64_t width = t.routes_per_token;
  if (width == 0) return;
  const auto routes = t.routed_experts.span().subspan(range.begin * width, (range.end - range.begin) * width);
  const bool absent = std::all_of(routes.begin(), routes.end(), [](int32_t id) { return id == -1; });
  if (!absent) check_routes(routes);
}

void check_row_turn_rewards(const Trajectories& t, int64_t r) {
  if (!t.has_turn_rewards(r)) return;
  if (t.reward.has(r)) throw_field("turn_rewards", "either turn_rewards or reward", "both");
  const int64_t turns = static_cast<int64_t>(turn_starts(t, r).size());
  visit_reals(t.turn_rewards, t.turn_reward_offsets[r], t.turn_reward_offsets[r + 1],
              [&](auto rewards) { check_turn_rewards(rewards, turns); });
}

void check_row_ref_topk(const Trajectories& t, RowRange range, int64_t vocab_size) {
  const int64_t width = t.ref_topk, begin = range.begin * width, end = range.end * width;
  if (width == 0) return;
  visit_reals(t.ref_topk_logprobs, begin, end, [&](auto logprobs) {
    check_ref_topk(t.ref_topk_ids.span().subspan(begin, end - begin), logprobs, range.end - range.begin,
                   vocab_size);
  });
}

/// Checks that columns under second names agree with the first ones in row r.
void check_second_names(const Trajectories& t, const SecondNames& second, RowRange range) {
  const auto part = [&](const auto& column) {
    return column.span().subspan(range.begin, range.end - range.begin);
  };
  if (!second.labels.empty()) check_labels(part(second.labels), t.row(range.row));
  if (!second.masks.empty()) {
    std::vector<uint8_t> weighted(static_cast<size_t>(range.end - range.begin));
    for (size_t i = 0; i < weighted.size(); ++i) weighted[i] = t.loss_weights[range.begin + i] > 0;
    for (const SecondNames::Mask& mask : second.masks) {
      check_mask(mask.name, part(mask.values));
      check_same_mask(mask.name, part(mask.values), second.mask_name, weighted);
    }
  }
  for (const auto& [columns, first] :
       {std::pair(&second.logprobs, &t.logprobs), std::pair(&second.ref_logprobs, &t.ref_logprobs)}) {
    const auto& first_column = *first;  // not every compiler captures structured bindings
    for (const SecondNames::Reals& other : *columns) {
      if (other.values.has(range.row) != first_column.has(range.row))
        throw_field(other.name,
                    fmt::format("the rows that have `{}`, which is the same field", other.first_name),
                    "other rows");
      visit_reals(other.values.values, range.begin, range.end, [&](auto mine) {
        visit_reals(first_column.values, range.begin, range.end,
                    [&](auto theirs) { check_same_values(other.name, mine, other.first_name, theirs); });
      });
    }
  }
}

/// Checks row r by the rules of check_row(TrajectoryRow). Returns how many of its tokens carry loss.
int64_t check_packed_row(const Trajectories& t, const SecondNames& second, int64_t r, int64_t vocab_size) {
  const RowRange tokens{r, t.offsets[r], t.offsets[r + 1]};
  check_token_ids(t.row(r), vocab_size);
  int64_t loss_tokens = 0;
  visit_reals(t.loss_weights, tokens.begin, tokens.end, [&](auto values) {
    if constexpr (std::is_same_v<decltype(values), std::span<const uint8_t>>) {
      check_mask(second.mask_name, values);
    } else {
      check_loss_weights(values);
    }
    loss_tokens = count_loss_tokens(values);
  });
  for (const auto& [column_name, column] :
       {std::pair(second.logprobs_name, &t.logprobs), std::pair(second.ref_logprobs_name, &t.ref_logprobs)}) {
    check_optional(column_name, *column, tokens,
                   [&name = column_name](auto values) { check_logprobs(name, values); });
  }
  check_optional("advantages", t.advantages, tokens, [](auto values) { check_finite("advantages", values); });
  for (const RowReal& real : kRowReals) {
    check_optional(real.name, t.*real.column, {r, r, r + 1},
                   [&real](auto values) { check_row_real(real, values[0]); });
  }
  if (t.chosen.any()) {
    const uint8_t chosen = t.chosen.values[r];
    if (chosen > 1) throw_field("chosen", "0 or 1", std::to_string(chosen));
    if (!t.chosen.has(r) && chosen != 0) throw_field("chosen", "0 where the row lacks the field", "1");
  }
  for (const auto& [name, column] : kRowTexts) check_text(name, t.*column, r);
  check_row_routes(t, tokens);
  check_row_turn_rewards(t, r);
  check_row_ref_topk(t, tokens, vocab_size);
  check_second_names(t, second, tokens);
  return loss_tokens;
}

}  // namespace

Trajectories read_packed(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report) {
  ColumnReader reader(path);
  Trajectories mapped = reader.read();
  const std::string file = path.string();
  RowReport rows(options, report);
  FieldTally& fields = rows.fields();
  std::vector<int64_t> good;
  // The check reads every page of every column; without releasing them, all would stay resident.
  constexpr int64_t kReleaseEvery = int64_t{1} << 24;  // tokens
  int64_t next_release = kReleaseEvery;
  for (int64_t r = 0; r < mapped.num_rows() && !rows.enough(); ++r) {
    rows.progress(static_cast<double>(mapped.offsets[r]) / static_cast<double>(mapped.num_tokens() + 1));
    try {
      fields.loss_tokens += check_packed_row(mapped, reader.second_names(), r, options.vocab_size);
      fields.tokens += mapped.row_size(r);
      good.push_back(r);
      rows.good();
    } catch (const InputError& error) {
      rows.bad(fmt::format("{}: row {}: {}", file, r, error.what()));
    }
    if (mapped.offsets[r + 1] < next_release) continue;
    next_release = mapped.offsets[r + 1] + kReleaseEvery;
    mapped.release();
  }
  mapped.release();
  reader.check_whole();
  rows.finish(file);
  reader.tally(static_cast<int64_t>(good.size()), &fields);
  if (reader.second_names().mask_name.empty()) fields.rows_without_mask = static_cast<int64_t>(good.size());
  if (static_cast<int64_t>(good.size()) == mapped.num_rows()) return mapped;
  TrajectoriesBuilder builder(options.store);
  for (const int64_t r : good) builder.append(copy_row(mapped, r), options.vocab_size);
  return builder.finish();
}

void check_columns(const Trajectories& columns) {
  const Column<int64_t>& offsets = columns.offsets;
  const int64_t rows = columns.num_rows(), tokens = columns.num_tokens();
  ESPALIER_CHECK(!offsets.empty() && offsets[0] == 0 && offsets[rows] == tokens,
                 "offsets: expected entries from 0 to {}, the length of input_ids, received {}", tokens,
                 offsets.empty() ? "none" : fmt::format("{} to {}", offsets[0], offsets[rows]));
  for (int64_t r = 0; r < rows; ++r) {
    ESPALIER_CHECK(offsets[r] <= offsets[r + 1], "offsets: expected ascending values, received {} after {}",
                   offsets[r + 1], offsets[r]);
  }
  const auto check_size = [](const char* name, int64_t size, int64_t expected, bool may_lack = true) {
    ESPALIER_CHECK((size == 0 && may_lack) || size == expected, "{}: expected {} entries, received {}", name,
                   expected, size);
  };
  check_size("loss_weights", columns.loss_weights.size(), tokens, false);
  for (const auto& [name, column] : kTokenReals) check_size(name, (columns.*column).values.size(), tokens);
  for (const RowReal& real : kRowReals) check_size(real.name, (columns.*real.column).values.size(), rows);
  check_size("chosen", columns.chosen.values.size(), rows);
  check_size("turn_rewards.offsets", columns.turn_reward_offsets.size(),
             columns.turn_rewards.empty() ? 0 : rows + 1);
  check_size("target_ids", columns.target_ids.size(), tokens);
  check_size("ref_topk_ids", columns.ref_topk_ids.size(), tokens * columns.ref_topk);
  check_size("ref_topk_logprobs", columns.ref_topk_logprobs.size(), columns.ref_topk_ids.size());
  for (const auto& [name, column] : kRowTexts) check_size(name, std::ssize(columns.*column), rows);
  check_size("routed_experts", columns.routed_experts.size(), tokens * columns.routes_per_token);
  check_size("turn_rewards", columns.turn_rewards.size(),
             columns.turn_reward_offsets.empty() ? 0 : columns.turn_reward_offsets[rows]);
  SecondNames names;
  names.mask_name = "loss_mask";
  names.logprobs_name = "logprobs";
  names.ref_logprobs_name = "ref_logprobs";
  for (int64_t r = 0; r < rows; ++r) {
    try {
      check_packed_row(columns, names, r, 0);
    } catch (const InputError& error) {
      throw InputError(fmt::format("row {}: {}", columns.name(r), error.what()));
    }
  }
}

}  // namespace espalier
