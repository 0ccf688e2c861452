// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/adapter.h"

#include <ATen/ATen.h>

#include <map>
#include <string_view>
#include <utility>

#include "espalier/ops/checks.h"

namespace espalier {

at::ScalarType trained_dtype(at::ScalarType dtype, bool has_adapter) {
  return has_adapter ? detail::accumulator_dtype(dtype) : dtype;
}

std::vector<Parameter> merged_weights(const std::vector<Parameter>& weights, const Adapter& adapter) {
  const at::NoGradGuard no_grad;
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> pairs;  // A and B by the name of the weight
  for (size_t i = 0; i + 1 < adapter.parameters.size(); i += 2) {
    const std::string& a = adapter.parameters[i].name;
    const std::string map = a.substr(0, a.size() - std::string_view(kLoraA).size());
    pairs[map + ".weight"] = {adapter.parameters[i].value, adapter.parameters[i + 1].value};
  }
  std::vector<Parameter> merged;
  for (const Parameter& weight : weights) {
    const auto pair = pairs.find(weight.name);
    if (pair == pairs.end()) {
      merged.push_back(weight);
      continue;
    }
    const auto& [a, b] = pair->second;
    const at::Tensor sum = weight.value.detach().to(a.scalar_type()) + b.matmul(a) * adapter.scale;
    merged.push_back({weight.name, sum.to(weight.value.scalar_type())});
  }
  return merged;
}

void check_adapter(const ModelSpec& spec, const Adapter& adapter) {
  const std::vector<Parameter>& parameters = adapter.parameters;
  size_t next = 0;
  for (const LinearMap& map : adaptable_maps(spec)) {
    if (next + 1 >= parameters.size() || parameters[next].name != map.name + kLoraA) continue;
    const Parameter &a = parameters[next], &b = parameters[next + 1];
    TORCH_CHECK(b.name == map.name + kLoraB, "Decoder: expected ", map.name, kLoraB, ", received ", b.name);
    TORCH_CHECK(a.value.dim() == 2 && a.value.size(1) == map.in, "Decoder: expected ", a.name, " [rank, ",
                map.in, "], received ", a.value.sizes());
    TORCH_CHECK(b.value.sizes() == at::IntArrayRef({map.out, a.value.size(0)}), "Decoder: expected ", b.name,
                " [", map.out, ", ", a.value.size(0), "], received ", b.value.sizes());
    next += 2;
  }
  TORCH_CHECK(next == parameters.size(),
              "Decoder: expected parameters of adapters in the order of the maps, received ",
              parameters.size() - next, " others, the first ", parameters[next].name);
}

}  // namespace espalier
