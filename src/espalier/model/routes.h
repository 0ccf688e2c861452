// SPDX-License-Identifier: Apache-2.0
// The experts that the tokens of a pass went to, kept so that another pass can take the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace espalier {

/// Experts [T, num_experts_per_tok] int64 of each call of a mixture of experts, in the order of the calls.
using Routes = std::vector<at::Tensor>;

// At most one of these lives at a time; it belongs to the thread of the passes.

/// While it lives, mixtures of experts append what they choose to `routes`.
class RecordRoutes {
 public:
  explicit RecordRoutes(Routes* routes);
  ~RecordRoutes();
  RecordRoutes(const RecordRoutes&) = delete;
  RecordRoutes& operator=(const RecordRoutes&) = delete;
};

/// While it lives, mixtures of experts take `routes`, which outlive it, one after the other instead of
/// choosing.
class ReplayRoutes {
 public:
  explicit ReplayRoutes(const Routes& routes);
  ~ReplayRoutes();
  ReplayRoutes(const ReplayRoutes&) = delete;
  ReplayRoutes& operator=(const ReplayRoutes&) = delete;
};

/// The next of the routes to replay, if there are any to replay.
std::optional<at::Tensor> next_route();

/// Keeps what a mixture of experts has chosen, if it is recorded.
void record_route(const at::Tensor& experts);

}  // namespace espalier
