// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/safetensors.h"

#include <simdjson.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "espalier/base/check.h"

namespace espalier {
namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and mapped as it is");

// The limit of the reference implementation.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kMetadataKey = "__metadata__";

/// Bytes of one element, or 0 for an unknown dtype.
int64_t known_dtype_bytes(std::string_view dtype) {
  static const std::map<std::string_view, int64_t> bytes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
      {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8}};
  const auto found = bytes.find(dtype);
  return found == bytes.end() ? 0 : found->second;
}

/// Elements of a shape; false when a dimension is negative or the product does not fit in 64 bits.
bool count_elements(const std::vector<int64_t>& shape, int64_t& elements) {
  elements = 1;
  for (const int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(elements, dimension, &elements)) return false;
  }
  return true;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// Throws unless shape x dtype is exactly `bytes`.
void check_size(const std::string& where, const TensorView& tensor, uint64_t bytes) {
  const int64_t element_bytes = known_dtype_bytes(tensor.dtype);
  ESPALIER_CHECK(element_bytes > 0, "{}: tensor `{}`: unknown dtype `{}`", where, tensor.name, tensor.dtype);
  int64_t expected = 0;
  const bool fits =
      count_elements(tensor.shape, expected) && !__builtin_mul_overflow(expected, element_bytes, &expected);
  ESPALIER_CHECK(fits, "{}: tensor `{}`: shape {} is negative or too large", where, tensor.name,
                 shape_text(tensor.shape));
  ESPALIER_CHECK(static_cast<uint64_t>(expected) == bytes,
                 "{}: tensor `{}`: {} {} needs {} bytes, received {}", where, tensor.name, tensor.dtype,
                 shape_text(tensor.shape), expected, bytes);
}

struct HeaderEntry {
  TensorView tensor;
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// Reads the JSON header. `where` is the file's name; every fault throws.
class HeaderReader {
 public:
  explicit HeaderReader(std::string where) : where_(std::move(where)) {}

  void read(std::string_view json) {
    // Like the reference implementation, which refuses leading blanks.
    check(!json.empty() && json.front() == '{', "the header must begin with an opening brace");
    simdjson::dom::parser parser;
    simdjson::dom::element root;
    const auto error = parser.parse(json.data(), json.size()).get(root);
    check(error == simdjson::SUCCESS, "the header is not JSON: {}", simdjson::error_message(error));
    simdjson::dom::object object;
    check(root.get(object) == simdjson::SUCCESS, "the header is not a JSON object");
    std::set<std::string_view> names;
    for (const auto field : object) {
      check(names.insert(field.key).second, "duplicate name `{}`", field.key);
      if (field.key == kMetadataKey) {
        read_metadata(field.value);
      } else {
        read_tensor(std::string(field.key), field.value);
      }
    }
  }

  std::vector<HeaderEntry> entries;
  std::map<std::string, std::string> metadata;

 private:
  template <typename... Args>
  void check(bool condition, fmt::format_string<Args...> format, Args&&... args) const {
    if (!condition) throw InputError(where_ + ": " + fmt::format(format, std::forward<Args>(args)...));
  }

  void read_metadata(simdjson::dom::element element) {
    simdjson::dom::object object;
    check(element.get(object) == simdjson::SUCCESS, "{} must be an object of strings", kMetadataKey);
    for (const auto field : object) {
      std::string_view value;
      check(field.value.get(value) == simdjson::SUCCESS, "{}: `{}` must be a string", kMetadataKey,
            field.key);
      check(metadata.emplace(field.key, value).second, "{}: duplicate name `{}`", kMetadataKey, field.key);
    }
  }

  void read_tensor(const std::string& name, simdjson::dom::element element) {
    HeaderEntry entry;
    entry.tensor.name = name;
    simdjson::dom::object object;
    check(element.get(object) == simdjson::SUCCESS, "tensor `{}`: expected an object", name);
    std::set<std::string_view> fields;
    for (const auto field : object) {
      check(fields.insert(field.key).second, "tensor `{}`: duplicate field `{}`", name, field.key);
      if (field.key == "dtype") {
        std::string_view dtype;
        check(field.value.get(dtype) == simdjson::SUCCESS, "tensor `{}`: dtype must be a string", name);
        entry.tensor.dtype = dtype;
      } else if (field.key == "shape") {
        entry.tensor.shape = read_integers(name, "shape", field.value);
      } else if (field.key == "data_offsets") {
        const std::vector<int64_t> offsets = read_integers(name, "data_offsets", field.value);
        check(offsets.size() == 2 && offsets[0] <= offsets[1],
              "tensor `{}`: data_offsets must be [begin, end]", name);
        entry.begin = static_cast<uint64_t>(offsets[0]);
        entry.end = static_cast<uint64_t>(offsets[1]);
      }
    }
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      check(fields.contains(field), "tensor `{}`: field `{}` is missing", name, field);
    }
    check_size(where_, entry.tensor, entry.end - entry.begin);
    entries.push_back(std::move(entry));
  }

  std::vector<int64_t> read_integers(const std::string& name, const char* field,
                                     simdjson::dom::element element) {
    simdjson::dom::array array;
    check(element.get(array) == simdjson::SUCCESS, "tensor `{}`: {} must be a list", name, field);
    std::vector<int64_t> values;
    for (const simdjson::dom::element item : array) {
      int64_t value = -1;
      check(item.get(value) == simdjson::SUCCESS && value >= 0,
            "tensor `{}`: {} must hold integers >= 0 of at most 63 bits", name, field);
      values.push_back(value);
    }
    return values;
  }

  std::string where_;
};

/// Sorts the entries into file order and assigns each its bytes of `buffer`, which they must cover exactly.
std::vector<TensorView> place(const std::string& where, std::vector<HeaderEntry> entries,
                              std::span<const std::byte> buffer) {
  std::stable_sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::vector<TensorView> tensors;
  uint64_t position = 0;
  for (HeaderEntry& entry : entries) {
    ESPALIER_CHECK(entry.begin == position,
                   "{}: tensor `{}`: data_offsets begin at {}, expected {} (no holes, no overlap)", where,
                   entry.tensor.name, entry.begin, position);
    ESPALIER_CHECK(entry.end <= buffer.size(),
                   "{}: tensor `{}`: data_offsets end at {}, but the file has {} bytes of "
                   "data (is it truncated?)",
                   where, entry.tensor.name, entry.end, buffer.size());
    entry.tensor.bytes = buffer.subspan(entry.begin, entry.end - entry.begin);
    position = entry.end;
    tensors.push_back(std::move(entry.tensor));
  }
  ESPALIER_CHECK(position == buffer.size(), "{}: the tensors end at {}, but the file has {} bytes of data",
                 where, position, buffer.size());
  return tensors;
}

std::string make_header(const std::string& where, const std::vector<TensorView>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  // ordered_json looks keys up by linear search, so entries are appended directly and names are checked here.
  auto& fields = header.get_ref<nlohmann::ordered_json::object_t&>();
  std::set<std::string_view> names{kMetadataKey};
  uint64_t position = 0;
  for (const TensorView& tensor : tensors) {
    ESPALIER_CHECK(names.insert(tensor.name).second, "{}: the name `{}` is reserved or given twice", where,
                   tensor.name);
    check_size(where, tensor, tensor.bytes.size());
    const uint64_t end = position + tensor.bytes.size();
    nlohmann::ordered_json entry;
    entry["dtype"] = tensor.dtype;
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {position, end};
    fields.push_back({tensor.name, std::move(entry)});
    position = end;
  }
  try {
    std::string text = header.dump();
    // The data begins at a multiple of 8, so that values are aligned when the file is mapped.
    text.append((8 - text.size() % 8) % 8, ' ');
    return text;
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: a tensor's name or the metadata is not UTF-8", where));
  }
}

}  // namespace

int64_t TensorView::num_elements() const {
  int64_t elements = 0;
  ESPALIER_CHECK(count_elements(shape, elements), "tensor `{}`: shape {} is negative or too large", name,
                 shape_text(shape));
  return elements;
}

int64_t dtype_bytes(const std::string& dtype) {
  const int64_t bytes = known_dtype_bytes(dtype);
  ESPALIER_CHECK(bytes > 0, "unknown dtype `{}`", dtype);
  return bytes;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(std::make_shared<MappedFile>(path)) {
  const std::string where = path.string();
  const std::span<const std::byte> bytes = file_->bytes();
  uint64_t header_bytes = 0;
  ESPALIER_CHECK(bytes.size() >= sizeof header_bytes,
                 "{}: expected a safetensors file, received only {} bytes (is it truncated?)", where,
                 bytes.size());
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  ESPALIER_CHECK(header_bytes <= kMaxHeaderBytes,
                 "{}: the safetensors header says {} bytes, at most {} are allowed (is it another format?)",
                 where, header_bytes, kMaxHeaderBytes);
  const std::span<const std::byte> rest = bytes.subspan(sizeof header_bytes);
  ESPALIER_CHECK(header_bytes <= rest.size(),
                 "{}: the header says {} bytes, the file has {} (is it truncated?)", where, header_bytes,
                 rest.size());
  HeaderReader reader(where);
  reader.read({reinterpret_cast<const char*>(rest.data()), header_bytes});
  tensors_ = place(where, std::move(reader.entries), rest.subspan(header_bytes));
  metadata_ = std::move(reader.metadata);
  for (size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
}

const TensorView* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const TensorView& SafetensorsFile::at(const std::string& name) const {
  const TensorView* tensor = find(name);
  ESPALIER_CHECK(tensor != nullptr, "{}: tensor `{}` is missing", path().string(), name);
  return *tensor;
}

void write_safetensors(const std::filesystem::path& path, const std::vector<TensorView>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<void()>& release) {
  const std::string header = make_header(path.string(), tensors, metadata);
  ESPALIER_CHECK(header.size() <= kMaxHeaderBytes,
                 "{}: the header would have {} bytes, at most {} are allowed", path.string(), header.size(),
                 kMaxHeaderBytes);
  const uint64_t header_bytes = header.size();
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(&header_bytes, 1)));
  file.write(header);
  constexpr size_t kBlockBytes = size_t{1} << 26;
  for (const TensorView& tensor : tensors) {
    for (auto rest = tensor.bytes; !rest.empty(); rest = rest.subspan(std::min(kBlockBytes, rest.size()))) {
      file.write(rest.first(std::min(kBlockBytes, rest.size())));
      if (release) release();
    }
  }
  file.commit();
}

}  // namespace espalier
