// SPDX-License-Identifier: Apache-2.0
// What the losses and metrics of a step's batches sum up to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "espalier/engine/forward.h"
#include "espalier/engine/unit_loss.h"

namespace espalier {

/// A metric of the objective, reduced over the terms of the step.
struct StepMetric {
  std::string name;
  double value = 0;
};

/// Sums by the parts of the loss (Loss::part): one unless it is a mix.
class StepSums {
 public:
  /// Of a step of which nothing has run. The loss must outlive this object. `units`: of a loss that
  /// is_wide().
  StepSums(const Loss& loss, at::Device device, const std::optional<UnitLoss>& units);

  /// What forward passes have to give: entropies that have a part in the loss, or in metrics alone.
  Entropies entropies() const;

  /// What a batch adds to the loss beside losses of wider scope, in the graph: its entropies, and the
  /// objectives whose scope is a token; undefined where there are none. Adds it and its metrics to the sums.
  /// `logprobs` [M]: values_of_terms of the forward pass.
  at::Tensor add(const Batch& batch, const at::Tensor& logprobs, const ForwardResult& forwarded);

  /// Losses of wider scope, and their metrics.
  void add(const std::vector<UnitLoss::PartValue>& values);

  /// [1 + metrics] float64 on the device: of the loss, then each metric, reduced.
  const at::Tensor& values() const { return values_; }

  struct Read {
    double loss;
    std::vector<StepMetric> metrics;  // of the parts with terms
  };
  /// Waits for the device: for all that came before in the stream.
  Read read() const;

 private:
  /// A mean is over the terms, or units, of the metric's part.
  struct SummedMetric {
    std::string name;
    Reduction reduction;
    int64_t part;
    double scale;
  };
  struct Part {
    int64_t first_metric;   // in values_
    int64_t num_units;      // trajectories, groups or pairs with terms, for scopes wider than a token
    int64_t num_terms = 0;  // of the batches so far
  };
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

  const Loss* loss_;
  std::vector<Part> parts_;
  std::vector<SummedMetric> metrics_;
  at::Tensor values_;
};

}  // namespace espalier
