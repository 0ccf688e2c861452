// SPDX-License-Identifier: Apache-2.0
// State space models, computed token by token, from ATen operators; autograd differentiates it.
#pragma once

#include <ATen/ATen.h>

#include "espalier/ops/ssm_scan/ssm_scan.h"
#include "tests/ops/chunk_scan/reference.h"

namespace espalier::reference {

inline SsmScanOutput ssm_scan(const SsmScan& given) {
  const auto dtype = given.dt.scalar_type();
  const int64_t repeat = given.x.size(1) / given.b.size(1);
  std::vector<at::Tensor> states, outs;
  for (int64_t t = 0; t < given.x.size(0); ++t) {
    const at::Tensor x = given.x[t].to(dtype);                                            // [H, P]
    const at::Tensor b = given.b[t].to(dtype).repeat_interleave(repeat, 0).unsqueeze(2);  // [H, N, 1]
    const at::Tensor c = given.c[t].to(dtype).repeat_interleave(repeat, 0).unsqueeze(2);
    const at::Tensor dt = given.dt[t].view({-1, 1, 1});
    const at::Tensor zeros = at::zeros({x.size(0), b.size(1), x.size(1)}, given.dt.options());
    const at::Tensor before = state_before(given.prev[t].item<int32_t>(), states, given.states, zeros);
    states.push_back(before * (dt * given.a.view({-1, 1, 1})).exp() + dt * b * x.unsqueeze(1));
    at::Tensor out = (states.back() * c).sum({1});
    if (given.d.defined()) out = out + given.d.unsqueeze(1) * x;
    outs.push_back(out);
  }
  return {at::stack(outs).to(given.x.scalar_type()), states_at(given.ends, states)};
}

}  // namespace espalier::reference
