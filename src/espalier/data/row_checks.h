// SPDX-License-Identifier: Apache-2.0
// Checks of the values of one row, for every input format. A fault throws InputError "field `F`: expected E,
// received R"; the caller, which knows file and line, puts them in front.
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

struct RowReal;

/// How far above 0 a log-probability may be. Rounding stays below it even with float logits in the thousands;
/// a probability or a negated log-probability, given by mistake, does not.
inline constexpr double kLogprobSlack = 1e-3;

[[noreturn]] void throw_field(std::string_view field, std::string_view expected, std::string_view received);

/// Throws for an invalid token id, given as text because it may not fit in 32 bits.
[[noreturn]] void throw_token_id(std::string_view id, int64_t index, int64_t vocab_size);

/// Checks that there is at least one id and that all are in [0, vocab_size); vocab_size 0: all >= 0.
void check_token_ids(std::span<const int32_t> ids, int64_t vocab_size);

/// Checks that a field of a row of `tokens` tokens has as many entries. For names that other programs use for
/// arrays of the response alone, the message says how to extend them to the whole row.
void check_length(std::string_view field, int64_t length, int64_t tokens);

/// Checks that all expert ids are >= 0.
void check_routes(std::span<const int32_t> routes);

/// Checks the reference tokens of a row, K for each of its `tokens` tokens: as many ids as log-probabilities,
/// none for the first token, and for every other token none (-1 in all K entries) or K distinct ids below
/// vocab_size (0: any). check_ref_topk checks the log-probabilities too.
void check_topk_ids(std::span<const int32_t> ids, size_t num_logprobs, int64_t tokens, int64_t vocab_size);

/// The first index whose value is not good, or the number of values. Blocks are checked without branches, so
/// that compilers vectorise the loop.
template <typename T, typename Predicate>
size_t first_bad(std::span<const T> values, Predicate good) {
  constexpr size_t kBlock = 256;
  // The flag has the size of a value, because compilers do not vectorise mixed sizes.
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

/// Checks that every value satisfies `good`. The message names the first that does not and its index.
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

/// Checks a value of a column of kRowReals.
void check_row_real(const RowReal& real, double value);

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

/// check_topk_ids, and checks that the log-probabilities are finite, at most kLogprobSlack, and 0 where a
/// token has no ids.
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

/// Whether any token of the row has reference tokens.
inline bool has_ref_topk(std::span<const int32_t> ids) {
  return std::any_of(ids.begin(), ids.end(), [](int32_t id) { return id >= 0; });
}

/// The number of turns of a row with these loss weights: maximal ranges of tokens with loss, not counting the
/// first token.
template <typename T>
int64_t count_turns(std::span<const T> weights) {
  int64_t count = 0;
  for (size_t i = 1; i < weights.size(); ++i) count += weights[i] > 0 && (i == 1 || !(weights[i - 1] > 0));
  return count;
}

/// Checks rewards of a row with `turns` turns.
template <typename T>
void check_turn_rewards(std::span<const T> rewards, int64_t turns) {
  if (static_cast<int64_t>(rewards.size()) != turns)
    throw_field("turn_rewards", fmt::format("{} entries (one per turn, a range of tokens with loss)", turns),
                std::to_string(rewards.size()));
  check_finite("turn_rewards", rewards);
}

/// Checks unshifted `labels` of a causal model: each is -100 or the token itself. `labels` is as long as
/// `ids`.
template <typename T>
void check_labels(std::span<const T> labels, std::span<const int32_t> ids) {
  size_t i = 0;
  while (i < labels.size() && (labels[i] == kNoLabel || labels[i] == ids[i])) ++i;
  if (i == labels.size()) [[likely]]
    return;
  const bool shifted = i + 1 < ids.size() && labels[i] == ids[i + 1];
  throw_field(kLabels, "-100 or the token of input_ids at the same place",
              fmt::format("{} at index {}, where input_ids has {}{}", labels[i], i, ids[i],
                          shifted ? " (the next token: give unshifted labels)" : ""));
}

/// Checks that two names of one 0/1 field agree on every token but the first, which cannot carry loss.
void check_same_mask(std::string_view name, std::span<const uint8_t> mask, std::string_view other_name,
                     std::span<const uint8_t> other);

/// Checks that two names of one field hold the same values.
template <typename T, typename U>
void check_same_values(std::string_view name, std::span<const T> values, std::string_view other_name,
                       std::span<const U> others) {
  for (size_t i = 0; i < std::min(values.size(), others.size()); ++i) {
    const auto value = static_cast<double>(values[i]), other = static_cast<double>(others[i]);
    if (value == other || (std::isnan(value) && std::isnan(other))) [[likely]]
      continue;
    throw_field(name,
                fmt::format("the values of `{}`, which is the same field (keep one of them)", other_name),
                fmt::format("{} at index {}, where `{}` has {}", values[i], i, other_name, others[i]));
  }
}

/// Counts the tokens whose weight is above 0, except the first token of the row, which nothing predicts.
/// Bytes must be 0 or 1.
template <typename T>
int64_t count_loss_tokens(std::span<const T> weights) {
  int64_t count = 0;
  size_t i = 1;
  if constexpr (sizeof(T) == 1) {
    // Adds eight bytes at a time; each byte of `sums` is at most 31. The product puts the sum of the eight
    // bytes into the top byte.
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
