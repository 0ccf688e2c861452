// SPDX-License-Identifier: Apache-2.0
// The paths that recurrences and convolutions follow.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace espalier::detail {

/// Operators that walk along paths are given `prev` [T] int32 on the CPU: for each token the one before it on
/// its path, which has a lower number; kPathBegins where there is none; continues(c) where the path goes on
/// from context c, which is something before the tokens of the list.
inline constexpr int32_t kPathBegins = -1;
constexpr int32_t continues(int64_t context) {
  return static_cast<int32_t>(-2 - context);
}

/// The context that such an entry names, -1 where it names none.
constexpr int64_t context_of(int32_t before) {
  return before <= -2 ? -2 - static_cast<int64_t>(before) : -1;
}

/// The values of `prev`. Throws where its dtype, shape or device is not as said, or an entry names no earlier
/// token and none of the contexts.
std::span<const int32_t> checked_prev(const char* op, const at::Tensor& prev, int64_t num_tokens,
                                      int64_t num_contexts);

/// The values of `tokens` [E] int64 on the CPU, each in [0, num_tokens).
std::span<const int64_t> checked_tokens(const char* op, const char* name, const at::Tensor& tokens,
                                        int64_t num_tokens);

}  // namespace espalier::detail
