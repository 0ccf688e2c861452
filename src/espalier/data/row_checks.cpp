#include "espalier/data/row_checks.h"

#include <simdjson.h>

namespace espalier {

std::string shortened(std::string_view text) {
  constexpr size_t kMaxBytes = 60;
  std::string result(text.substr(0, kMaxBytes));
  const bool cut = text.size() > kMaxBytes;
  // A cut may fall inside a character: its bytes (10xxxxxx after the first) go too.
  if (cut) {
    while (!result.empty() && (result.back() & 0xC0) == 0x80) result.pop_back();
    if (!result.empty() && (result.back() & 0x80) != 0) result.pop_back();
  }
  const bool valid = simdjson::validate_utf8(result);
  for (char& c : result) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F || (byte >= 0x80 && !valid)) c = '?';
  }
  return cut ? result + "..." : result;
}

void throw_field(std::string_view field, std::string_view expected, std::string_view received) {
  throw InputError(fmt::format("field `{}`: expected {}, received {}", field, expected, received));
}

void throw_token_id(std::string_view id, int64_t index, int64_t vocab_size) {
  const std::string expected = vocab_size > 0 ? fmt::format("ids in [0, {0}) (vocab_size is {0})", vocab_size)
                                              : std::string("ids in [0, 2147483647]");
  throw_field("input_ids", expected, fmt::format("{} at index {}", shortened(id), index));
}

void check_token_ids(std::span<const int32_t> ids, int64_t vocab_size) {
  if (ids.empty()) throw_field("input_ids", "at least one token", "none");
  constexpr int64_t kMaxIds = int64_t{1} << 31;
  const auto end = static_cast<uint32_t>(vocab_size > 0 ? std::min(vocab_size, kMaxIds) : kMaxIds);
  // A negative id is a large one without its sign.
  const size_t i = first_bad(ids, [end](int32_t id) { return static_cast<uint32_t>(id) < end; });
  if (i < ids.size()) [[unlikely]]
    throw_token_id(std::to_string(ids[i]), static_cast<int64_t>(i), vocab_size);
}

void check_length(std::string_view field, int64_t length, int64_t tokens) {
  if (length != tokens)
    throw_field(field, fmt::format("{} entries (one for each of input_ids)", tokens), std::to_string(length));
}

void check_routes(std::span<const int32_t> routes) {
  check_values("routed_experts", routes, "expert ids >= 0", [](int32_t id) { return id >= 0; });
}

}  // namespace espalier
