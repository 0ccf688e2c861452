// SPDX-License-Identifier: Apache-2.0
// Maps tensor dtypes to kernel element types.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/ops/kernels/element.h"

namespace espalier::detail {

template <class Element>
struct ElementType {};

/// Calls function(ElementType<Element>()) for the element of float64, float32 or bfloat16.
template <class Function>
void for_element_of(at::ScalarType dtype, const Function& function) {
  if (dtype == at::kDouble) return function(ElementType<double>());
  if (dtype == at::kFloat) return function(ElementType<float>());
  function(ElementType<BFloat16>());
}

/// The data of a tensor; null if it is undefined.
template <class Element>
const Element* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const Element*>(tensor.const_data_ptr()) : nullptr;
}
template <class Element>
Element* mutable_data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<Element*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace espalier::detail
