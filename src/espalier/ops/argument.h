// SPDX-License-Identifier: Apache-2.0
// What structs of arguments of operators are made of (operator.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace espalier {

/// A tensor that may be left out: undefined then, and `Tensor?` in the schema.
struct TensorOrNone : at::Tensor {
  TensorOrNone() = default;
  TensorOrNone(at::Tensor tensor) : at::Tensor(std::move(tensor)) {}
  TensorOrNone(const std::optional<at::Tensor>& tensor) : at::Tensor(tensor.value_or(at::Tensor())) {}
};

}  // namespace espalier
