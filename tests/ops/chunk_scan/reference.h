// SPDX-License-Identifier: Apache-2.0
// Shared by reference implementations of recurrences.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "espalier/ops/paths.h"

namespace espalier::reference {

/// The state before a token: of the previous token on its path, of a context, or zeros.
inline at::Tensor state_before(int32_t before, const std::vector<at::Tensor>& states,
                               const at::Tensor& contexts, const at::Tensor& zeros) {
  if (before >= 0) return states[before];
  const int64_t context = detail::context_of(before);
  return context >= 0 ? contexts[context] : zeros;
}

/// The states at `ends`.
inline at::Tensor states_at(const at::Tensor& ends, const std::vector<at::Tensor>& states) {
  std::vector<at::Tensor> wanted;
  for (int64_t e = 0; e < ends.size(0); ++e) wanted.push_back(states[ends[e].item<int64_t>()]);
  return wanted.empty() ? at::zeros({0}, states[0].options()) : at::stack(wanted);
}

}  // namespace espalier::reference
