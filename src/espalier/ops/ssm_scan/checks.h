// SPDX-License-Identifier: Apache-2.0
// The arguments of ssm_scan, as the dispatcher hands them on.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace espalier::detail {

struct SsmArguments {
  const at::Tensor &x, &dt, &a, &b, &c;
  const std::optional<at::Tensor>& d;
  const at::Tensor& prev;
  const std::optional<at::Tensor>& states;
  const at::Tensor& ends;
  int64_t chunk_size;
};

using SsmResults = std::tuple<at::Tensor, at::Tensor>;  // out, states at the ends
/// Of x, dt, A, B, C, D and states, in their dtypes.
using SsmGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// What the dispatcher calls for a function of SsmArguments.
template <auto kFunction>
SsmResults ssm_scan_of(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                       const at::Tensor& c, const std::optional<at::Tensor>& d, const at::Tensor& prev,
                       const std::optional<at::Tensor>& states, const at::Tensor& ends, int64_t chunk_size) {
  return kFunction({x, dt, a, b, c, d, prev, states, ends, chunk_size});
}

/// The same for one of the gradients of the results too.
template <auto kFunction>
SsmGradients ssm_scan_backward_of(const std::optional<at::Tensor>& grad_out,
                                  const std::optional<at::Tensor>& grad_end_states, const at::Tensor& x,
                                  const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                                  const at::Tensor& c, const std::optional<at::Tensor>& d,
                                  const at::Tensor& prev, const std::optional<at::Tensor>& states,
                                  const at::Tensor& ends, int64_t chunk_size) {
  return kFunction(grad_out, grad_end_states, {x, dt, a, b, c, d, prev, states, ends, chunk_size});
}

/// Ranks, shapes, dtypes and devices; not the values of prev and ends.
void check_ssm_scan(const SsmArguments& given);

/// Gradients in the dtype of sums: of v = dt x [T, H, P], of g = dt A [T, H], of B, C and states.
struct SsmRowGradients {
  at::Tensor v, g, b, c, states;
};

/// What follows from them; `grad_out` in the dtype of sums.
SsmGradients ssm_gradients(const SsmArguments& given, const at::Tensor& grad_out,
                           const SsmRowGradients& rows);

}  // namespace espalier::detail
