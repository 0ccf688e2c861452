#include "espalier/data/packed.h"

#include <simdjson.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "espalier/base/safetensors.h"
#include "espalier/data/builder.h"
#include "espalier/data/row_checks.h"
#include "espalier/data/row_report.h"

namespace espalier {
namespace {

/// Takes the file's pages out of this process; a page that is read again comes back from the page cache.
void release_pages(const MappedFile& file) {
  // Advice: when the kernel does not take it, pages stay, and nothing else differs.
  ::madvise(const_cast<std::byte*>(file.bytes().data()), file.bytes().size(), MADV_DONTNEED);
}

template <typename T>
constexpr const char* dtype_of();
template <>
constexpr const char* dtype_of<uint8_t>() {
  return "U8";
}
template <>
constexpr const char* dtype_of<int32_t>() {
  return "I32";
}
template <>
constexpr const char* dtype_of<int64_t>() {
  return "I64";
}
template <>
constexpr const char* dtype_of<float>() {
  return "F32";
}
template <>
constexpr const char* dtype_of<double>() {
  return "F64";
}

bool has_dtype(const TensorView& tensor, const std::string& dtype) {
  return tensor.dtype == dtype || (dtype == "U8" && tensor.dtype == "BOOL");
}

/// Makes columns of a file's tensors. A fault throws InputError "FILE: field `F`: ...".
class ColumnReader {
 public:
  explicit ColumnReader(const std::filesystem::path& path) : file_(path) {}

  Trajectories read();

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
  Column<T> column(const TensorView& tensor) const;
  Column<int64_t> offsets(const TensorView& tensor) const;
  RealColumn reals(const TensorView& tensor) const;
  RealColumn weights() const;
  Column<uint8_t> present(const std::string& name) const;
  Optional<RealColumn> optional_reals(const std::string& name, int64_t size) const;
  std::vector<std::string> texts(const std::string& name) const;
  void read_routes(Trajectories& result) const;

  SafetensorsFile file_;
  int64_t rows_ = 0;
  int64_t tokens_ = 0;
};

template <typename T>
Column<T> ColumnReader::column(const TensorView& tensor) const {
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

Column<int64_t> ColumnReader::offsets(const TensorView& tensor) const {
  if (tensor.shape.size() != 1 || tensor.shape[0] < 1)
    fail(tensor.name, "shape [rows + 1]", fmt::format("[{}]", fmt::join(tensor.shape, ", ")));
  Column<int64_t> values = column<int64_t>(tensor);
  if (values[0] != 0) fail(tensor.name, "0 at index 0", std::to_string(values[0]));
  for (int64_t i = 1; i < values.size(); ++i) {
    if (values[i] < values[i - 1])
      fail(tensor.name, "ascending values",
           fmt::format("{} after {} at index {}", values[i], values[i - 1], i));
  }
  return values;
}

RealColumn ColumnReader::reals(const TensorView& tensor) const {
  if (tensor.dtype == "F32") return column<float>(tensor);
  if (tensor.dtype == "F64") return column<double>(tensor);
  fail(tensor.name, "dtype F32 or F64", tensor.dtype);
}

RealColumn ColumnReader::weights() const {
  const TensorView* mask = file_.find("loss_mask");
  const TensorView* weights = file_.find("loss_weights");
  if (mask != nullptr && weights != nullptr) fail("loss_mask", "either loss_mask or loss_weights", "both");
  if (mask == nullptr && weights == nullptr)
    return Column<uint8_t>(std::vector<uint8_t>(static_cast<size_t>(tokens_), 1));
  const TensorView& tensor = mask != nullptr ? *mask : *weights;
  check_shape(tensor, {tokens_});
  if (mask != nullptr) return column<uint8_t>(tensor);
  return reals(tensor);
}

Column<uint8_t> ColumnReader::present(const std::string& name) const {
  const TensorView* tensor = file_.find(name + ".present");
  if (tensor == nullptr) return {};
  check_shape(*tensor, {rows_});
  Column<uint8_t> values = column<uint8_t>(*tensor);
  for (int64_t r = 0; r < rows_; ++r) {
    if (values[r] > 1) fail(tensor->name, "0 or 1", fmt::format("{} at index {}", values[r], r));
  }
  return values;
}

Optional<RealColumn> ColumnReader::optional_reals(const std::string& name, int64_t size) const {
  const TensorView* tensor = file_.find(name);
  if (tensor == nullptr) return {};
  check_shape(*tensor, {size});
  return {reals(*tensor), present(name)};
}

std::vector<std::string> ColumnReader::texts(const std::string& name) const {
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

void ColumnReader::read_routes(Trajectories& result) const {
  const TensorView* tensor = file_.find("routed_experts");
  if (tensor == nullptr) return;
  if (tensor->shape.size() != 2 || tensor->shape[0] != tokens_ || tensor->shape[1] < 1)
    fail(tensor->name, fmt::format("shape [{}, routes per token]", tokens_),
         fmt::format("[{}]", fmt::join(tensor->shape, ", ")));
  result.routed_experts = column<int32_t>(*tensor);
  result.routes_per_token = tensor->shape[1];
}

Trajectories ColumnReader::read() {
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
  result.logprobs = optional_reals("logprobs", tokens_);
  result.ref_logprobs = optional_reals("ref_logprobs", tokens_);
  result.advantages = optional_reals("advantages", tokens_);
  result.reward = optional_reals("reward", rows_);
  if (const TensorView* chosen = file_.find("chosen")) {
    check_shape(*chosen, {rows_});
    result.chosen = {column<uint8_t>(*chosen), present("chosen")};
  }
  result.trajectory_id = texts("trajectory_id");
  result.group_id = texts("group_id");
  result.pair_id = texts("pair_id");
  read_routes(result);
  result.release = [file = file_.mapping()] { release_pages(*file); };
  return result;
}

/// Calls check(values) with the part of a real column that belongs to a row, at its own precision.
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

/// Row r of the columns keeps the rules of check_row(TrajectoryRow).
void check_packed_row(const Trajectories& t, int64_t r, int64_t vocab_size) {
  const RowRange tokens{r, t.offsets[r], t.offsets[r + 1]};
  check_token_ids(t.row(r), vocab_size);
  visit_reals(t.loss_weights, tokens.begin, tokens.end, [](auto values) {
    if constexpr (std::is_same_v<decltype(values), std::span<const uint8_t>>) {
      check_values("loss_mask", values, "0 or 1", [](uint8_t value) { return value <= 1; });
    } else {
      check_loss_weights(values);
    }
  });
  check_optional("logprobs", t.logprobs, tokens, [](auto values) { check_logprobs("logprobs", values); });
  check_optional("ref_logprobs", t.ref_logprobs, tokens,
                 [](auto values) { check_logprobs("ref_logprobs", values); });
  check_optional("advantages", t.advantages, tokens, [](auto values) { check_finite("advantages", values); });
  check_optional("reward", t.reward, {r, r, r + 1}, [](auto values) { check_finite("reward", values); });
  if (t.chosen.any()) {
    const uint8_t chosen = t.chosen.values[r];
    if (chosen > 1) throw_field("chosen", "0 or 1", std::to_string(chosen));
    if (!t.chosen.has(r) && chosen != 0) throw_field("chosen", "0 where the row lacks the field", "1");
  }
  check_text("trajectory_id", t.trajectory_id, r);
  check_text("group_id", t.group_id, r);
  check_text("pair_id", t.pair_id, r);
  check_row_routes(t, tokens);
}

/// Bytes that are made here, and the tensors that view them or the columns.
class TensorList {
 public:
  template <typename T>
  void add(const std::string& name, std::span<const T> values, std::vector<int64_t> shape) {
    tensors_.push_back({name, dtype_of<T>(), std::move(shape), std::as_bytes(values)});
  }
  template <typename T>
  void add(const std::string& name, std::span<const T> values) {
    add(name, values, {static_cast<int64_t>(values.size())});
  }

  void add_reals(const std::string& name, const RealColumn& column) {
    if (const auto* floats = std::get_if<Column<float>>(&column.values())) return add(name, floats->span());
    const int64_t size = column.size();
    bool all_float = true;
    for (int64_t i = 0; i < size && all_float; ++i) {
      // The range first: converting a double that no float can hold is undefined.
      all_float = std::abs(column[i]) <= std::numeric_limits<float>::max() &&
                  static_cast<double>(static_cast<float>(column[i])) == column[i];
    }
    if (all_float) {
      add(name, made<float>(size, [&](int64_t i) { return static_cast<float>(column[i]); }));
    } else {
      add(name, made<double>(size, [&](int64_t i) { return column[i]; }));
    }
  }

  void add_optional_reals(const std::string& name, const Optional<RealColumn>& column) {
    if (!column.any()) return;
    add_reals(name, column.values);
    add_present(name, column.present);
  }

  void add_present(const std::string& name, const Column<uint8_t>& present) {
    if (!present.empty()) add(name + ".present", present.span());
  }

  void add_texts(const std::string& name, const std::vector<std::string>& texts) {
    if (texts.empty()) return;
    std::string joined;
    std::vector<int64_t> ends;
    for (const std::string& text : texts) {
      joined += text;
      ends.push_back(static_cast<int64_t>(joined.size()));
    }
    add(name, made<uint8_t>(static_cast<int64_t>(joined.size()), [&](int64_t i) { return joined[i]; }));
    add(name + ".offsets", made<int64_t>(static_cast<int64_t>(ends.size()) + 1,
                                         [&](int64_t i) { return i == 0 ? 0 : ends[i - 1]; }));
  }

  /// Wide elements first, so that every tensor is aligned in the file.
  const std::vector<TensorView>& sorted() {
    std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorView& a, const TensorView& b) {
      return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
    });
    return tensors_;
  }

 private:
  template <typename T, typename Value>
  std::span<const T> made(int64_t size, Value value) {
    auto values = std::make_shared<std::vector<T>>(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) (*values)[i] = static_cast<T>(value(i));
    owned_.push_back(values);
    return *values;
  }

  std::vector<TensorView> tensors_;
  std::vector<std::shared_ptr<const void>> owned_;
};

}  // namespace

Trajectories read_packed(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report) {
  Trajectories mapped = ColumnReader(path).read();
  const std::string file = path.string();
  RowReport rows(options, report);
  std::vector<int64_t> good;
  // The pages of every column are touched here; without this all would stay until the mapping ends.
  constexpr int64_t kReleaseEvery = int64_t{1} << 24;  // tokens
  int64_t next_release = kReleaseEvery;
  for (int64_t r = 0; r < mapped.num_rows() && !rows.enough(); ++r) {
    rows.progress(static_cast<double>(mapped.offsets[r]) / static_cast<double>(mapped.num_tokens() + 1));
    try {
      check_packed_row(mapped, r, options.vocab_size);
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
  rows.finish(file);
  if (static_cast<int64_t>(good.size()) == mapped.num_rows()) return mapped;
  TrajectoriesBuilder builder;
  for (const int64_t r : good) builder.append(copy_row(mapped, r), options.vocab_size);
  return builder.finish();
}

void write_packed(const std::filesystem::path& path, const Trajectories& trajectories) {
  const Trajectories& t = trajectories;
  TensorList tensors;
  const std::vector<int64_t> no_rows{0};
  tensors.add("offsets", t.offsets.empty() ? std::span(no_rows) : t.offsets.span());
  tensors.add("input_ids", t.input_ids.span());
  if (const auto* mask = std::get_if<Column<uint8_t>>(&t.loss_weights.values())) {
    tensors.add("loss_mask", mask->span());
  } else {
    tensors.add_reals("loss_weights", t.loss_weights);
  }
  tensors.add_optional_reals("logprobs", t.logprobs);
  tensors.add_optional_reals("ref_logprobs", t.ref_logprobs);
  tensors.add_optional_reals("advantages", t.advantages);
  tensors.add_optional_reals("reward", t.reward);
  if (t.chosen.any()) {
    tensors.add("chosen", t.chosen.values.span());
    tensors.add_present("chosen", t.chosen.present);
  }
  tensors.add_texts("trajectory_id", t.trajectory_id);
  tensors.add_texts("group_id", t.group_id);
  tensors.add_texts("pair_id", t.pair_id);
  if (t.routes_per_token > 0)
    tensors.add("routed_experts", t.routed_experts.span(), {t.num_tokens(), t.routes_per_token});
  write_safetensors(path, tensors.sorted());
}

}  // namespace espalier
