// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/parameters.h"

#include <ATen/ATen.h>

#include "espalier/base/check.h"

namespace espalier {

const at::Tensor* NamedParameters::find(const std::string& name) const {
  const std::string whole = prefix_ + name;
  for (const Parameter& parameter : parameters_) {
    if (parameter.name == whole) return &parameter.value;
  }
  return nullptr;
}

const at::Tensor& NamedParameters::at(const std::string& name) const {
  const at::Tensor* found = find(name);
  ESPALIER_ASSERT(found != nullptr);
  return *found;
}

accumulating::Projection NamedParameters::projection(const std::string& name) const {
  const at::Tensor* bias = find(name + ".bias");
  return {at(name + ".weight"), bias == nullptr ? at::Tensor() : *bias};
}

}  // namespace espalier
