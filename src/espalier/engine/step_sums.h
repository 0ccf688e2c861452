// SPDX-License-Identifier: Apache-2.0
// What the losses and metrics of micro-batches sum up to, while a step runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/engine/engine.h"
#include "espalier/engine/unit_loss.h"

namespace espalier {

/// The sums of a step (PendingStep::sums), by the parts of its loss (Loss::part): one unless it is a mix.
class StepSums {
 public:
  /// Sets sums, metrics and numbers of tokens to those of a step of which nothing has run. `units`: of a loss
  /// that is_wide(), else null. Step, loss and `pending` must outlive this object.
  StepSums(const Step& step, const Loss& loss, at::Device device, const UnitLoss* units,
              PendingStep* pending);

  /// What forward passes have to give: entropies that have a part in the loss, or in metrics alone.
  Entropies entropies() const;

  /// What a batch adds to the loss beside losses of wider scope, in the graph: its entropies, and the
  /// objectives whose scope is a token; undefined where there are none. Adds it and its metrics to the sums.
  /// `logprobs` [M]: values_of_terms of the forward pass.
  at::Tensor add(const Batch& batch, const at::Tensor& logprobs, const ForwardResult& forwarded);

  /// Losses of wider scope, and their metrics.
  void add(const std::vector<UnitLoss::PartValue>& values);

 private:
  /// What a batch's head says of its terms.
  struct HeadValues {
    const at::Tensor& logprobs;         // [M] float64, in the graph
    const at::Tensor& entropy_of_edge;  // [E], where entropies()
    TermTensors terms;
  };

  const ObjectiveOptions& options_of(int64_t part) const;
  bool reports_entropy(int64_t part) const;
  std::vector<Metric> metrics_of(int64_t part) const;
  at::Tensor add_part(int64_t part, const Batch& batch, const HeadValues& values);
  at::Tensor add_entropies(int64_t part, const at::Tensor& coefficients, const at::Tensor& entropy);
  void add_to_loss(int64_t part, const at::Tensor& loss);
  void add_value(int64_t part, const ObjectiveValue& value);

  const Loss& loss_;
  std::vector<int64_t> first_metric_;  // of each part, in PendingStep::sums
  PendingStep* pending_;
};

}  // namespace espalier
