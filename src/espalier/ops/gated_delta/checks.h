// SPDX-License-Identifier: Apache-2.0
// The arguments of gated_delta_rule, as the dispatcher hands them on.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace espalier::detail {

struct DeltaArguments {
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const at::Tensor& g;
  const at::Tensor& beta;
  const at::Tensor& prev;
  const std::optional<at::Tensor>& states;
  const at::Tensor& ends;
  int64_t chunk_size;
};

using DeltaResults = std::tuple<at::Tensor, at::Tensor>;  // out, states at the ends
/// Of q, k, v, g, beta and states, in their dtypes.
using DeltaGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// What the dispatcher calls for a function of DeltaArguments.
template <auto kFunction>
DeltaResults delta_rule_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                           const at::Tensor& beta, const at::Tensor& prev,
                           const std::optional<at::Tensor>& states, const at::Tensor& ends,
                           int64_t chunk_size) {
  return kFunction({q, k, v, g, beta, prev, states, ends, chunk_size});
}

/// The same for one of the gradients of the results too.
template <auto kFunction>
DeltaGradients delta_rule_backward_of(const std::optional<at::Tensor>& grad_out,
                                      const std::optional<at::Tensor>& grad_end_states, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                                      const at::Tensor& beta, const at::Tensor& prev,
                                      const std::optional<at::Tensor>& states, const at::Tensor& ends,
                                      int64_t chunk_size) {
  return kFunction(grad_out, grad_end_states, {q, k, v, g, beta, prev, states, ends, chunk_size});
}

/// Ranks, shapes, dtypes and devices; not the values of prev and ends.
void check_gated_delta_rule(const DeltaArguments& given);

/// x / sqrt(|x|^2 + 1e-6) over the last dimension, and the factor.
struct UnitRows {
  at::Tensor unit, inverse_length;
};
UnitRows unit_rows(const at::Tensor& x);

/// The gradient of x, from that of the unit rows.
at::Tensor unit_rows_backward(const at::Tensor& grad, const UnitRows& rows);

}  // namespace espalier::detail
