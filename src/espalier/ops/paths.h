// SPDX-License-Identifier: Apache-2.0
// Representation of paths for recurrences and convolutions, and lists of indices on devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace espalier::detail {

/// Operators on paths take `prev` [T] int32 on the CPU: for each token the index of the previous token on its
/// path, which is smaller; kPathBegins if there is none; continues(c) if the path continues context c.
inline constexpr int32_t kPathBegins = -1;
constexpr int32_t continues(int64_t context) {
  return static_cast<int32_t>(-2 - context);
}

/// The context of such an entry, -1 if it has none.
constexpr int64_t context_of(int32_t before) {
  return before <= -2 ? -2 - static_cast<int64_t>(before) : -1;
}

/// The values of `prev`. Throws on wrong dtype, shape or device, or if an entry is neither an earlier token
/// nor a context.
std::span<const int32_t> checked_prev(const char* op, const at::Tensor& prev, int64_t num_tokens,
                                      int64_t num_contexts);

/// The values of `tokens` [E] int64 on the CPU, each in [0, num_tokens).
std::span<const int64_t> checked_tokens(const char* op, const char* name, const at::Tensor& tokens,
                                        int64_t num_tokens);

/// [N] int64 on the device, without synchronisation.
at::Tensor to_indices(const std::vector<int64_t>& values, at::Device device);

}  // namespace espalier::detail
