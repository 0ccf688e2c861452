// SPDX-License-Identifier: Apache-2.0
// The arguments of gated_delta_rule, as the dispatcher hands them on.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

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

/// Ranks, shapes, dtypes and devices; not the values of prev and ends.
void check_gated_delta_rule(const DeltaArguments& given);

/// x / sqrt(|x|^2 + 1e-6) over the last dimension, and the factor.
struct UnitRows {
  at::Tensor unit, inverse_length;
};
UnitRows unit_rows(const at::Tensor& x);

}  // namespace espalier::detail
