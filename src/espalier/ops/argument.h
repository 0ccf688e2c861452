// SPDX-License-Identifier: Apache-2.0
// Members of argument structs of operators (operator.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace espalier {

/// An optional tensor: undefined if absent; `Tensor?` in the schema.
struct TensorOrNone : at::Tensor {
  TensorOrNone() = default;
  TensorOrNone(at::Tensor tensor) : at::Tensor(std::move(tensor)) {}
  TensorOrNone(const std::optional<at::Tensor>& tensor) : at::Tensor(tensor.value_or(at::Tensor())) {}
};

}  // namespace espalier
