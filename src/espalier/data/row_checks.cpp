// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/row_checks.h"

#include <vector>

#include "espalier/base/printable.h"
#include "espalier/data/trajectories.h"

namespace espalier {

void throw_field(std::string_view field, std::string_view expected, std::string_view received) {
  throw InputError(fmt::format("field `{}`: expected {}, received {}", printable(field), expected, received));
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
  // A negative id is a large unsigned one.
  const size_t i = first_bad(ids, [end](int32_t id) { return static_cast<uint32_t>(id) < end; });
  if (i < ids.size()) [[unlikely]]
    throw_token_id(std::to_string(ids[i]), static_cast<int64_t>(i), vocab_size);
}

namespace {

/// Whether a name is an alias that other programs use.
bool is_alias(std::string_view field) {
  const std::optional<size_t> name = find_field_name(field);
  return name && name_of(kFieldNames[*name].field) != field;
}

std::string why_shorter(std::string_view field, int64_t length, int64_t tokens) {
  if (!is_alias(field) || length >= tokens) return "";
  return fmt::format(
      " (if it covers only the last {}, the response, put {} before it for each of the other {})", length,
      field == kLabels ? "-100" : "0", tokens - length);
}

}  // namespace

void check_length(std::string_view field, int64_t length, int64_t tokens) {
  if (length == tokens) return;
  throw_field(field, fmt::format("{} entries (one for each of input_ids)", tokens),
              fmt::format("{}{}", length, why_shorter(field, length, tokens)));
}

void check_same_mask(std::string_view name, std::span<const uint8_t> mask, std::string_view other_name,
                     std::span<const uint8_t> other) {
  for (size_t i = 1; i < std::min(mask.size(), other.size()); ++i) {
    if (mask[i] == other[i]) [[likely]]
      continue;
    throw_field(name, fmt::format("loss on the same tokens as by `{}` (keep one of them)", other_name),
                fmt::format("{} at index {}, where `{}` has {}", mask[i] != 0 ? "loss" : "no loss", i,
                            other_name, other[i] != 0 ? "it" : "none"));
  }
}

void check_topk_ids(std::span<const int32_t> ids, size_t num_logprobs, int64_t tokens, int64_t vocab_size) {
  if (ids.size() != num_logprobs)
    throw_field("ref_topk_logprobs", fmt::format("{} entries (one for each of ref_topk_ids)", ids.size()),
                std::to_string(num_logprobs));
  if (ids.empty()) return;
  const auto width = static_cast<int64_t>(ids.size()) / tokens;
  if (width * tokens != static_cast<int64_t>(ids.size()))
    throw_field("ref_topk_ids", fmt::format("as many ids for each of {} tokens", tokens),
                fmt::format("{} ids", ids.size()));
  std::vector<int32_t> sorted;
  for (int64_t token = 0; token < tokens; ++token) {
    const auto token_ids = ids.subspan(token * width, width);
    const auto none = std::ranges::count(token_ids, -1);
    if (none == width) continue;
    if (token == 0) throw_field("ref_topk_ids", "none for the first token", fmt::format("{}", token_ids[0]));
    sorted.assign(token_ids.begin(), token_ids.end());
    std::ranges::sort(sorted);
    if (sorted.front() < 0 || (vocab_size > 0 && sorted.back() >= vocab_size))
      throw_field("ref_topk_ids",
                  vocab_size > 0 ? fmt::format("{0} ids in [0, {1}) (vocab_size is {1})", width, vocab_size)
                                 : fmt::format("{} ids >= 0", width),
                  fmt::format("{} for token {}", sorted.front() < 0 ? sorted.front() : sorted.back(), token));
    if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
      throw_field("ref_topk_ids", "different ids for each token",
                  fmt::format("{} twice for token {}", *twice, token));
  }
}

void check_row_real(const RowReal& real, double value) {
  if (!std::isfinite(value) || !real.is_good(value))
    throw_field(real.name, real.expected, fmt::format("{}", value));
}

void check_routes(std::span<const int32_t> routes) {
  check_values("routed_experts", routes, "expert ids >= 0", [](int32_t id) { return id >= 0; });
}

}  // namespace espalier
