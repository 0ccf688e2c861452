// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/recorded_routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "espalier/base/check.h"

namespace espalier {
namespace {

/// The experts of one token and router; `place` names the token.
template <class Place>
void check_choice(std::span<const int32_t> experts, int64_t num_experts, const Place& place) {
  for (size_t i = 0; i < experts.size(); ++i) {
    ESPALIER_CHECK(experts[i] < num_experts, "{}: expected experts from 0 to {}, received {}", place(),
                   num_experts - 1, experts[i]);
    ESPALIER_CHECK(std::find(experts.begin(), experts.begin() + i, experts[i]) == experts.begin() + i,
                   "{}: expected different experts for each router, received {} twice", place(), experts[i]);
  }
}

}  // namespace

std::vector<int64_t> recorded_routes(const Trajectories& trajectories, int64_t first_token, int64_t size,
                                     const RouterShape& routers) {
  const int64_t width = trajectories.routes_per_token;
  const auto recorded = trajectories.routed_experts.span().subspan(first_token * width, size * width);
  std::vector<int64_t> routes(recorded.begin(), recorded.end());
  ESPALIER_ASSERT(width % routers.top_k == 0);
  for (auto begin = routes.begin(); begin != routes.end(); begin += routers.top_k) {
    std::sort(begin, begin + routers.top_k);
  }
  return routes;
}

void check_recorded_routes(const std::string& where, const Trajectories& trajectories,
                           const RouterShape& routers, int64_t num_layers) {
  const int64_t width = trajectories.routes_per_token, top_k = routers.top_k;
  if (width == 0 || routers.count() == 0) return;
  const bool per_router = width == routers.count() * top_k;
  ESPALIER_CHECK(
      per_router || width == num_layers * top_k,
      "{}: field `routed_experts`: expected {} experts for each token ({} of each of {} routers){}, "
      "received {}",
      where, routers.count() * top_k, top_k, routers.count(),
      num_layers == routers.count() ? "" : fmt::format(" or {} (of each layer)", num_layers * top_k), width);
  const std::span<const int32_t> routes = trajectories.routed_experts.span();
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    for (int64_t t = 0; t < trajectories.row_size(row); ++t) {
      const auto token = routes.subspan((trajectories.offsets[row] + t) * width, width);
      if (token[0] < 0) break;  // a row without routes
      const auto place = [&] {
        return fmt::format("{}: row {}: field `routed_experts`, token {}", where, trajectories.name(row), t);
      };
      for (int64_t i = 0; i < routers.count(); ++i) {
        const int64_t group = per_router ? i : routers.layers[i];
        check_choice(token.subspan(group * top_k, top_k), routers.experts, place);
      }
    }
  }
}

}  // namespace espalier
