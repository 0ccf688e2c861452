// SPDX-License-Identifier: Apache-2.0
// Routers in the per-trajectory reference: recorded routes, and router losses by their definition.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "espalier/data/trajectories.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/options.h"
#include "espalier/verify/causal_sequence.h"

namespace espalier {

/// Hidden states of one row of the data, run as a single sequence with its recorded routes.
at::Tensor hidden_of_row(const Decoder& decoder, const Trajectories& trajectories, int64_t row,
                         RouterRecord* record);

/// The data with the routes that the decoder's routers choose for each row alone. Returned unchanged if the
/// data have routes or the model has no routers.
Trajectories with_routes(const Trajectories& trajectories, const Decoder& decoder);

/// Router losses over all rows of the data, independent of RouterStatistics on purpose.
class ReferenceRouters {
 public:
  /// Runs every row once, without gradients, if the load-balancing loss is enabled.
  ReferenceRouters(const Decoder& decoder, const Trajectories& trajectories, const ObjectiveOptions& options);

  bool any() const { return options_.has_router_losses(); }

  /// A row's contribution to the losses, including coefficients: float64, differentiable in the logits.
  at::Tensor share(const RouterRecord& record) const;

 private:
  at::Tensor probabilities(const at::Tensor& logits) const;

  ObjectiveOptions options_;
  bool sigmoid_;
  int64_t num_experts_;
  double rows_;                   // logit rows over all routers and rows of the data
  at::Tensor share_of_expert_{};  // [experts]: fraction of logit rows routed to each
};

}  // namespace espalier
