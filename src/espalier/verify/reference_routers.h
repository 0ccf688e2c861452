// SPDX-License-Identifier: Apache-2.0
// Routers in the reference run: recorded routes of single trajectories, and losses of routers by their
// definition.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "espalier/data/trajectories.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/options.h"
#include "espalier/verify/causal_sequence.h"

namespace espalier {

/// Hidden states of one row of the data as a sequence of its own; its recorded routes are taken.
at::Tensor hidden_of_row(const Decoder& decoder, const Trajectories& trajectories, int64_t row,
                         RouterRecord* record);

/// The data with the routes recorded that the decoder's routers choose for each row by itself; as they are
/// where they have routes, or the model no routers.
Trajectories with_routes(const Trajectories& trajectories, const Decoder& decoder);

/// The losses of the routers over all rows of the data, written without RouterStatistics on purpose.
class ReferenceRouters {
 public:
  /// Runs every row once, without gradients, if the load-balancing loss is asked for.
  ReferenceRouters(const Decoder& decoder, const Trajectories& trajectories, const ObjectiveOptions& options);

  bool any() const { return options_.has_router_losses(); }

  /// A row's share of the losses, with their coefficients: float64, differentiable in the logits.
  at::Tensor share(const RouterRecord& record) const;

 private:
  at::Tensor probabilities(const at::Tensor& logits) const;

  ObjectiveOptions options_;
  bool sigmoid_;
  int64_t num_experts_;
  double rows_;                   // of logits, of all routers and rows
  at::Tensor share_of_expert_{};  // [experts]: tokens sent there, per row of logits
};

}  // namespace espalier
