// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/parameters.h"

#include <ATen/ATen.h>

#include "espalier/base/check.h"

namespace espalier {

const at::Tensor* NamedParameters::find(std::span<const Parameter> parameters,
                                        const std::string& name) const {
  const std::string whole = prefix_ + name;
  for (const Parameter& parameter : parameters) {
    if (parameter.name == whole) return &parameter.value;
  }
  return nullptr;
}

const at::Tensor& NamedParameters::at(const std::string& name) const {
  const at::Tensor* found = find(parameters_, name);
  ESPALIER_ASSERT(found != nullptr);
  return *found;
}

accumulating::Projection NamedParameters::projection(const std::string& name) const {
  accumulating::Projection projection{at(name + ".weight")};
  if (const at::Tensor* bias = find(parameters_, name + ".bias")) projection.bias = *bias;
  projection.adapter = adapter(name);
  return projection;
}

accumulating::LowRank NamedParameters::adapter(const std::string& name) const {
  const at::Tensor* a = adapter_ == nullptr ? nullptr : find(adapter_->parameters, name + kLoraA);
  if (a == nullptr) return {};
  const at::Tensor* b = find(adapter_->parameters, name + kLoraB);
  ESPALIER_ASSERT(b != nullptr);
  return {*a, *b, adapter_->scale};
}

}  // namespace espalier
