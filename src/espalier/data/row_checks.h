// The rules that the values of one row obey, for every form of input. A fault throws InputError
// "field `F`: expected E, received R"; who knows the file puts the place before it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "espalier/base/check.h"

namespace espalier {

/// A log-probability may exceed 0 by rounding alone. Float logits in the thousands stay below this; a
/// probability or a negated log-probability given by mistake does not.
inline constexpr double kLogprobSlack = 1e-3;

/// `text` fit for an error message: one line of valid UTF-8, at most about 60 bytes.
std::string shortened(std::string_view text);

[[noreturn]] void throw_field(std::string_view field, std::string_view expected, std::string_view received);

/// The fault of one token id, which may be too large for 32 bits.
[[noreturn]] void throw_token_id(std::string_view id, int64_t index, int64_t vocab_size);

/// At least one id, all in [0, vocab_size); vocab_size 0: all >= 0.
void check_token_ids(std::span<const int32_t> ids, int64_t vocab_size);

/// `length` entries for a row of `tokens` tokens.
void check_length(std::string_view field, int64_t length, int64_t tokens);

/// Expert ids, all >= 0.
void check_routes(std::span<const int32_t> routes);

/// The first index whose value is not good, or the number of values. Whole blocks are judged without a
/// branch, so that compilers make vector instructions of it.
template <typename T, typename Predicate>
size_t first_bad(std::span<const T> values, Predicate good) {
  constexpr size_t kBlock = 256;
  // As wide as a value: compilers give up on vectors of other widths.
  using Flag =
      std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  for (size_t begin = 0; begin < values.size(); begin += kBlock) {
    const size_t end = std::min(begin + kBlock, values.size());
    Flag bad = 0;
    for (size_t i = begin; i < end; ++i) bad |= static_cast<Flag>(good(values[i]) ? 0 : 1);
    if (bad == 0) [[likely]]
      continue;
    return begin + static_cast<size_t>(std::find_if_not(values.begin() + begin, values.begin() + end, good) -
                                       (values.begin() + begin));
  }
  return values.size();
}

/// Every value satisfies `good`; otherwise the fault names the first that does not, and its index.
template <typename T, typename Predicate>
void check_values(std::string_view field, std::span<const T> values, std::string_view expected,
                  Predicate good) {
  const size_t i = first_bad(values, good);
  if (i < values.size()) [[unlikely]]
    throw_field(field, expected, fmt::format("{} at index {}", values[i], i));
}

template <typename T>
void check_finite(std::string_view field, std::span<const T> values) {
  check_values(field, values, "finite numbers", [](T value) { return std::isfinite(value); });
}

template <typename T>
void check_loss_weights(std::span<const T> weights) {
  check_values("loss_weights", weights, "finite numbers >= 0",
               [](T weight) { return std::isfinite(weight) && weight >= 0; });
}

/// 0 for the first token, which nothing predicts, and finite values of at most kLogprobSlack after it.
template <typename T>
void check_logprobs(std::string_view field, std::span<const T> logprobs) {
  if (!logprobs.empty() && logprobs[0] != 0)
    throw_field(field, "null or 0 for the first token", fmt::format("{}", logprobs[0]));
  check_values(field, logprobs, "finite log-probabilities <= 0",
               [](T value) { return std::isfinite(value) && value <= kLogprobSlack; });
}

/// Nothing but zeros, as in a row that lacks the field.
template <typename T>
void check_absent(std::string_view field, std::span<const T> values) {
  check_values(field, values, "0 where the row lacks the field", [](T value) { return value == 0; });
}

}  // namespace espalier
