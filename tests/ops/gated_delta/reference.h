// SPDX-License-Identifier: Apache-2.0
// The gated delta rule, computed token by token, from ATen operators; autograd differentiates it.
#pragma once

#include <ATen/ATen.h>

#include <cmath>

#include "espalier/ops/gated_delta/gated_delta.h"
#include "tests/ops/chunk_scan/reference.h"

namespace espalier::reference {

inline GatedDeltaOutput gated_delta_rule(const GatedDeltaRule& given) {
  const auto dtype = given.g.scalar_type();
  const int64_t group = given.v.size(1) / given.q.size(1);
  const auto unit = [&](const at::Tensor& x) {
    const at::Tensor upcast_x = x.to(dtype);
    return upcast_x / (upcast_x.square().sum({-1}, /*keepdim=*/true) + 1e-6).sqrt();
  };
  std::vector<at::Tensor> states, outs;
  for (int64_t t = 0; t < given.q.size(0); ++t) {
    const at::Tensor q = unit(given.q[t]).repeat_interleave(group, 0).unsqueeze(2);  // [H, Dk, 1]
    const at::Tensor k = unit(given.k[t]).repeat_interleave(group, 0).unsqueeze(2);
    const at::Tensor v = given.v[t].to(dtype).unsqueeze(1);  // [H, 1, Dv]
    const at::Tensor zeros = at::zeros({v.size(0), k.size(1), v.size(2)}, given.g.options());
    const at::Tensor state = state_before(given.prev[t].item<int32_t>(), states, given.states, zeros) *
                             given.g[t].exp().view({-1, 1, 1});
    const at::Tensor update = given.beta[t].view({-1, 1, 1}) * (v - (state * k).sum({1}, true));
    states.push_back(state + k * update);
    outs.push_back((states.back() * q).sum({1}) / std::sqrt(static_cast<double>(k.size(1))));
  }
  return {at::stack(outs).to(given.q.scalar_type()), states_at(given.ends, states)};
}

}  // namespace espalier::reference
