// SPDX-License-Identifier: Apache-2.0
// What the definitions of operators share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace espalier::detail {

/// A registered operator, by its full name.
template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// An undefined tensor is none: how C++ callers and saved variables leave an argument out.
inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// Of the shape, dtype and device of `tensor`: results under the Meta key.
inline at::Tensor meta_like(const at::Tensor& tensor) {
  return at::empty_symint(tensor.sym_sizes(), tensor.options());
}

}  // namespace espalier::detail
