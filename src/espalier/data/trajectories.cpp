// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/trajectories.h"

#include <fmt/format.h>

#include <algorithm>

namespace espalier {
namespace {

/// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

std::string Trajectories::name(int64_t r) const {
  if (!trajectory_id.empty() && !trajectory_id[r].empty()) return trajectory_id[r];
  if (sources.empty()) return std::to_string(r);
  const auto next =
      std::upper_bound(sources.begin(), sources.end(), r,
                       [](int64_t row, const RowSource& source) { return row < source.first_row; });
  const RowSource& source = *(next - 1);
  return fmt::format("{} row {}", source.name, r - source.first_row);
}

std::vector<int64_t> turn_starts(const Trajectories& trajectories, int64_t r) {
  const int64_t begin = trajectories.offsets[r];
  std::vector<int64_t> starts;
  bool inside = false;
  for (int64_t position = 1; position < trajectories.row_size(r); ++position) {
    const bool carries_loss = trajectories.loss_weights[begin + position] > 0;
    if (carries_loss && !inside) starts.push_back(position);
    inside = carries_loss;
  }
  return starts;
}

std::vector<uint64_t> route_keys(const Trajectories& trajectories) {
  const int64_t width = trajectories.routes_per_token;
  if (width == 0) return {};
  const std::span<const int32_t> routes = trajectories.routed_experts.span();
  std::vector<uint64_t> keys(static_cast<size_t>(trajectories.num_tokens()));
  for (size_t token = 0; token < keys.size(); ++token) {
    uint64_t key = 0;
    for (const int32_t expert : routes.subspan(token * width, width)) {
      key = mix(key + 0x9E3779B97F4A7C15 + static_cast<uint32_t>(expert));
    }
    keys[token] = key;
  }
  return keys;
}

}  // namespace espalier
