// SPDX-License-Identifier: Apache-2.0
// Causal convolutions, computed token by token, from ATen operators; autograd differentiates it.
#pragma once

#include <ATen/ATen.h>

#include "espalier/ops/causal_conv1d/causal_conv1d.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/paths.h"

namespace espalier::reference {

/// The W rows up to token t on its path, oldest first: rows of tokens, of a tail, or zeros.
inline std::vector<at::Tensor> rows_up_to(const CausalConv1d& given, int64_t t) {
  const int64_t taps = given.weight.size(1);
  std::vector<at::Tensor> rows{given.x[t]};
  while (static_cast<int64_t>(rows.size()) < taps) {
    const int32_t before = t < 0 ? detail::kPathBegins : given.prev[t].item<int32_t>();
    const int64_t context = detail::context_of(before);
    if (context >= 0) {
      for (int64_t row = taps - 2; row >= 0; --row) rows.push_back(given.tails[context][row]);
    } else {
      rows.push_back(before < 0 ? at::zeros_like(given.x[0]) : given.x[before]);
    }
    t = before < 0 ? -1 : before;
  }
  rows.resize(taps);
  return {rows.rbegin(), rows.rend()};
}

inline at::Tensor causal_conv1d(const CausalConv1d& given) {
  const auto dtype = detail::accumulator_dtype(given.x.scalar_type());
  std::vector<at::Tensor> outs;
  for (int64_t t = 0; t < given.x.size(0); ++t) {
    const at::Tensor rows = at::stack(rows_up_to(given, t), 1).to(dtype);  // [C, W]
    at::Tensor sum = (rows * given.weight.to(dtype)).sum({1});
    if (given.bias.defined()) sum = sum + given.bias.to(dtype);
    outs.push_back(given.silu ? at::silu(sum) : sum);
  }
  return at::stack(outs).to(given.x.scalar_type());
}

inline at::Tensor causal_conv1d_tails(const CausalConv1d& given, const at::Tensor& ends) {
  const int64_t history = given.weight.size(1) - 1;
  if (history == 0) return at::zeros({ends.size(0), 0, given.x.size(1)}, given.x.options());
  std::vector<at::Tensor> tails;
  for (int64_t e = 0; e < ends.size(0); ++e) {
    std::vector<at::Tensor> rows = rows_up_to(given, ends[e].item<int64_t>());
    rows.erase(rows.begin());
    tails.push_back(at::stack(rows));
  }
  return at::stack(tails);
}

}  // namespace espalier::reference
