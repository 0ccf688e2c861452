// SPDX-License-Identifier: Apache-2.0
// The rules for the values of one row, for every form of input. A fault throws InputError "field `F`:
// expected E, received R". The caller, which knows the file, puts the place in front of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "espalier/base/check.h"
#include "espalier/data/fields.h"

namespace espalier {

/// Rounding may put a log-probability this far above 0. Float logits in the thousands stay below it. A
/// probability or a negated log-probability, given by mistake, does not.
inline constexpr double kLogprobSlack = 1e-3;

[[noreturn]] void throw_field(std::string_view field, std::string_view expected, std::string_view received);

/// The fault of one token id, which may be too large for 32 bits.
[[noreturn]] void throw_token_id(std::string_view id, int64_t index, int64_t vocab_size);

/// At least one id, all in [0, vocab_size); vocab_size 0: all >= 0.
void check_token_ids(std::span<const int32_t> ids, int64_t vocab_size);

/// `length` entries for a row of `tokens` tokens. For names that other programs use for arrays of the
/// response alone, the message says how to extend them to the whole row.
void check_length(std::string_view field, int64_t length, int64_t tokens);

/// Expert ids, all >= 0.
void check_routes(std::span<const int32_t> routes);

/// Reference tokens of a row, K for each of its `tokens` tokens: both lists are as long, the first token has
/// none, and every other has none (-1 in all its places) or K different ids below vocab_size (0: any).
/// check_logprobs of the values is the caller's, check_topk_logprobs.
void check_topk_ids(std::span<const int32_t> ids, size_t num_logprobs, int64_t tokens, int64_t vocab_size);

/// The first index whose value is not good, or the number of values. Whole blocks are checked without a
/// branch, so that compilers can vectorise the loop.
template <typename T, typename Predicate>
size_t first_bad(std::span<const T> values, Predicate good) {
  constexpr size_t kBlock = 256;
  // The flag is as wide as a value, because compilers do not vectorise mixed widths.
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

/// Checks that every value satisfies `good`. The message names the first that does not, and its index.
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

/// Checks that the first value is 0, because nothing predicts the first token, and that the others are finite
/// and at most kLogprobSlack.
template <typename T>
void check_logprobs(std::string_view field, std::span<const T> logprobs) {
  if (!logprobs.empty() && logprobs[0] != 0)
    throw_field(field, "null or 0 for the first token", fmt::format("{}", logprobs[0]));
  check_values(field, logprobs, "finite log-probabilities <= 0",
               [](T value) { return std::isfinite(value) && value <= kLogprobSlack; });
}

/// Checks the log-probabilities that stand beside check_topk_ids: finite, at most kLogprobSlack, and 0 where
/// a token has none.
template <typename T>
void check_ref_topk(std::span<const int32_t> ids, std::span<const T> logprobs, int64_t tokens,
                    int64_t vocab_size) {
  check_topk_ids(ids, logprobs.size(), tokens, vocab_size);
  check_values("ref_topk_logprobs", logprobs, "finite log-probabilities <= 0",
               [](T value) { return std::isfinite(value) && value <= kLogprobSlack; });
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 && logprobs[i] != 0) [[unlikely]]
      throw_field("ref_topk_logprobs", "0 where the token has no ref_topk_ids",
                  fmt::format("{} at index {}", logprobs[i], i));
  }
}

/// Whether any token has some.
inline bool has_ref_topk(std::span<const int32_t> ids) {
  return std::any_of(ids.begin(), ids.end(), [](int32_t id) { return id >= 0; });
}

/// How many turns a row with these loss weights has: stretches of tokens with loss, without the first token.
template <typename T>
int64_t count_turns(std::span<const T> weights) {
  int64_t count = 0;
  for (size_t i = 1; i < weights.size(); ++i) count += weights[i] > 0 && (i == 1 || !(weights[i - 1] > 0));
  return count;
}

/// Checks rewards, which are not empty, of a row with so many turns.
template <typename T>
void check_turn_rewards(std::span<const T> rewards, int64_t turns) {
  if (static_cast<int64_t>(rewards.size()) != turns)
    throw_field("turn_rewards",
                fmt::format("{} entries (one for each turn, a stretch of tokens with loss)", turns),
                std::to_string(rewards.size()));
  check_finite("turn_rewards", rewards);
}

/// Checks `labels` as a causal model takes them before it shifts them: each is -100 or the token itself.
/// `labels` is as long as `ids`.
template <typename T>
void check_labels(std::span<const T> labels, std::span<const int32_t> ids) {
  size_t i = 0;
  while (i < labels.size() && (labels[i] == kNoLabel || labels[i] == ids[i])) ++i;
  if (i == labels.size()) [[likely]]
    return;
  const bool shifted = i + 1 < ids.size() && labels[i] == ids[i + 1];
  throw_field(kLabels, "-100 or the token of input_ids at the same place",
              fmt::format("{} at index {}, where input_ids has {}{}", labels[i], i, ids[i],
                          shifted ? " (the next token: give labels before they are shifted)" : ""));
}

/// Checks that two names of one 0/1 field agree on every token that can carry loss, which is all but the
/// first.
void check_same_mask(std::string_view name, std::span<const uint8_t> mask, std::string_view other_name,
                     std::span<const uint8_t> other);

/// Checks that two names of one field hold the same values.
template <typename T, typename U>
void check_same_values(std::string_view name, std::span<const T> values, std::string_view other_name,
                       std::span<const U> others) {
  for (size_t i = 0; i < std::min(values.size(), others.size()); ++i) {
    if (static_cast<double>(values[i]) == static_cast<double>(others[i])) [[likely]]
      continue;
    throw_field(name,
                fmt::format("the values of `{}`, which is the same field (keep one of them)", other_name),
                fmt::format("{} at index {}, where `{}` has {}", values[i], i, other_name, others[i]));
  }
}

/// Counts the tokens whose weight is above 0, without the first token of the row, which nothing predicts.
/// Bytes must be 0 or 1.
template <typename T>
int64_t count_loss_tokens(std::span<const T> weights) {
  int64_t count = 0;
  size_t i = 1;
  if constexpr (sizeof(T) == 1) {
    // Adds eight bytes at a time; each byte sum is at most 31. The product leaves the sum of the eight in the
    // top byte.
    constexpr size_t kWords = 31;
    for (uint64_t words[kWords]; i + sizeof words <= weights.size(); i += sizeof words) {
      std::memcpy(words, weights.data() + i, sizeof words);
      uint64_t sums = 0;
      for (const uint64_t word : words) sums += word;
      count += static_cast<int64_t>(sums * 0x0101010101010101 >> 56);
    }
  }
  for (; i < weights.size(); ++i) count += weights[i] > 0;
  return count;
}

/// Checks that all values are 0, as they must be in a row that lacks the field.
template <typename T>
void check_absent(std::string_view field, std::span<const T> values) {
  check_values(field, values, "0 where the row lacks the field", [](T value) { return value == 0; });
}

}  // namespace espalier
