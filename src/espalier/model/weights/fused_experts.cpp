// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/fused_experts.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <array>
#include <charconv>
#include <string_view>
#include <vector>

#include "espalier/base/check.h"

namespace espalier {
namespace {

/// A parameter EXPERTS + number + PARAMETER, and the fused tensor that contains it.
struct Part {
  std::string_view experts, parameter, fused;
  int64_t part, parts;
  bool always;
};
constexpr std::string_view kMlp = ".mlp.experts.", kSparse = ".block_sparse_moe.experts.";
constexpr auto kParts = std::to_array<Part>(
    {{kMlp, ".gate_proj.weight", ".mlp.experts.gate_up_proj", 0, 2, false},
     {kMlp, ".up_proj.weight", ".mlp.experts.gate_up_proj", 1, 2, false},
     {kMlp, ".down_proj.weight", ".mlp.experts.down_proj", 0, 1, false},
     {kSparse, ".input_linear.weight", ".block_sparse_moe.input_linear.weight", 0, 1, true},
     {kSparse, ".output_linear.weight", ".block_sparse_moe.output_linear.weight", 0, 1, true}});

}  // namespace

std::optional<FusedPlace> fused_place(const std::string& parameter) {
  for (const Part& part : kParts) {
    const size_t experts = parameter.find(part.experts);
    if (experts == std::string::npos) continue;
    const std::string_view rest = std::string_view(parameter).substr(experts + part.experts.size());
    int64_t expert = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), expert);
    if (error != std::errc() || rest.substr(static_cast<size_t>(end - rest.data())) != part.parameter)
      continue;
    return FusedPlace{parameter.substr(0, experts) + std::string(part.fused), expert, part.part, part.parts,
                      part.always};
  }
  return std::nullopt;
}

TensorView part_of(const TensorView& fused, const FusedPlace& place, const std::string& parameter,
                   const std::string& where) {
  const std::vector<int64_t>& shape = fused.shape;
  ESPALIER_CHECK(shape.size() == 3 && place.expert < shape[0] && shape[1] % place.parts == 0,
                 "{}: tensor `{}`: expected {} [experts, {}...], expert {} among them, received [{}]", where,
                 fused.name, parameter, place.parts == 2 ? "in 2 x " : "", place.expert,
                 fmt::join(shape, ", "));
  const int64_t rows = shape[1] / place.parts;
  const size_t size = fused.bytes.size() / static_cast<size_t>(shape[0] * place.parts);
  const auto index = static_cast<size_t>(place.expert * place.parts + place.part);
  return {parameter, fused.dtype, {rows, shape[2]}, fused.bytes.subspan(index * size, size)};
}

at::Tensor fuse_experts(const std::string& name, const std::map<std::string, at::Tensor>& values) {
  std::vector<at::Tensor> experts;
  for (int64_t expert = 0;; ++expert) {
    std::vector<at::Tensor> parts;
    for (const Part& part : kParts) {
      if (!name.ends_with(part.fused)) continue;
      const std::string layer = name.substr(0, name.size() - part.fused.size());
      const auto value = values.find(fmt::format("{}{}{}{}", layer, part.experts, expert, part.parameter));
      if (value != values.end()) parts.push_back(value->second.detach());
    }
    if (parts.empty()) return at::stack(experts);
    experts.push_back(at::cat(parts));
  }
}

}  // namespace espalier
