// SPDX-License-Identifier: Apache-2.0
// Access to parameters of a part of a model by their names in the checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <utility>

#include "espalier/model/adapter.h"
#include "espalier/model/gradient_accumulation.h"
#include "espalier/model/model.h"

namespace espalier {

class NamedParameters {
 public:
  /// The `parameters` whose names start with `prefix`; they must outlive this object.
  NamedParameters(std::span<const Parameter> parameters, std::string prefix)
      : parameters_(parameters), prefix_(std::move(prefix)) {}

  /// The same with adapters for its projections.
  NamedParameters(std::span<const Parameter> parameters, std::string prefix, const Adapter& adapter)
      : parameters_(parameters), prefix_(std::move(prefix)), adapter_(&adapter) {}

  /// Throws InternalError if there is none of that name.
  const at::Tensor& at(const std::string& name) const;

  /// NAME.weight with NAME.bias and adapter, if they exist.
  accumulating::Projection projection(const std::string& name) const;

  /// The adapter of a projection; undefined matrices if it has none.
  accumulating::LowRank adapter(const std::string& name) const;

 private:
  const at::Tensor* find(std::span<const Parameter> parameters, const std::string& name) const;

  std::span<const Parameter> parameters_;
  std::string prefix_;
  const Adapter* adapter_ = nullptr;
};

}  // namespace espalier
