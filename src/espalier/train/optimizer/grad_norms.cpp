// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/optimizer/grad_norms.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/model/global_norm.h"

namespace espalier {
namespace {

std::vector<std::string_view> split(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool is_norm(std::string_view module) {
  return module.find("norm") != std::string_view::npos;
}

}  // namespace

std::string module_kind(std::string_view parameter) {
  std::vector<std::string_view> modules = split(parameter);
  const auto layers = std::ranges::find(modules, "layers");
  if (modules.end() - layers < 3) {
    modules.pop_back();  // weight or bias
    if (modules.empty()) return std::string(parameter);
    return is_norm(modules.back()) ? "norm" : std::string(modules.back());
  }
  modules.erase(modules.begin(), layers + 2);  // the name within the layer remains
  if (is_norm(modules.front())) return "norm";
  const auto has = [&](std::string_view module) {
    return std::ranges::find(modules, module) != modules.end();
  };
  if (has("gate") || has("router")) return "router";
  if (has("experts") || modules.front() == "block_sparse_moe") return "experts";
  return std::string(modules.front());
}

std::vector<std::pair<std::string, double>> grad_norms_by_kind(const Decoder& decoder) {
  const std::vector<at::Tensor> gradients = decoder.gradients();
  std::vector<std::pair<std::string, std::vector<at::Tensor>>> groups;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const std::string kind = module_kind(decoder.parameters()[i].name);
    auto group = std::ranges::find(groups, kind, [](const auto& group) { return group.first; });
    if (group == groups.end()) group = groups.insert(group, {kind, {}});
    group->second.push_back(gradients[i]);
  }
  std::vector<std::pair<std::string, double>> norms;
  for (const auto& [kind, members] : groups) norms.emplace_back(kind, global_norm(members));
  return norms;
}

}  // namespace espalier
