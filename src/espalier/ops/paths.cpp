// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/paths.h"

#include <ATen/ATen.h>

namespace espalier::detail {
namespace {

template <class Number>
std::span<const Number> host_numbers(const char* op, const char* name, const at::Tensor& numbers) {
  constexpr at::ScalarType kDtype = c10::CppTypeToScalarType<Number>::value;
  TORCH_CHECK(numbers.dim() == 1 && numbers.scalar_type() == kDtype && numbers.device().is_cpu() &&
                  numbers.is_contiguous(),
              op, ": ", name, " must be contiguous, of one dimension, ", kDtype, ", on the CPU, received ",
              numbers.sizes(), " ", numbers.scalar_type(), " on ", numbers.device());
  return {numbers.const_data_ptr<Number>(), static_cast<size_t>(numbers.numel())};
}

}  // namespace

std::span<const int32_t> checked_prev(const char* op, const at::Tensor& prev, int64_t num_tokens,
                                      int64_t num_contexts) {
  const std::span<const int32_t> before = host_numbers<int32_t>(op, "prev", prev);
  TORCH_CHECK(static_cast<int64_t>(before.size()) == num_tokens, op,
              ": prev must have one entry for each of ", num_tokens, " tokens, received ", before.size());
  for (int64_t t = 0; t < num_tokens; ++t) {
    TORCH_CHECK(before[t] < t && context_of(before[t]) < num_contexts, op, ": prev[", t,
                "] must be an earlier token, -1, or -2 - c of one of ", num_contexts,
                " contexts c, received ", before[t]);
  }
  return before;
}

std::span<const int64_t> checked_tokens(const char* op, const char* name, const at::Tensor& tokens,
                                        int64_t num_tokens) {
  const std::span<const int64_t> values = host_numbers<int64_t>(op, name, tokens);
  for (const int64_t token : values) {
    TORCH_CHECK(0 <= token && token < num_tokens, op, ": ", name, " must name tokens below ", num_tokens,
                ", received ", token);
  }
  return values;
}

at::Tensor to_indices(const std::vector<int64_t>& values, at::Device device) {
  const auto size = static_cast<int64_t>(values.size());
  const at::Tensor host = at::from_blob(const_cast<int64_t*>(values.data()), {size}, at::kLong);
  // Pageable memory is copied before the call returns.
  return device.is_cpu() ? host.clone() : host.to(device, at::kLong, /*non_blocking=*/true);
}

}  // namespace espalier::detail
