// SPDX-License-Identifier: Apache-2.0
// Sums of the losses and metrics of a step's batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "espalier/distributed/group.h"
#include "espalier/engine/forward.h"
#include "espalier/engine/unit_loss.h"

namespace espalier {

/// A metric of the objective, reduced over the terms of the step.
struct StepMetric {
  std::string name;
  double value = 0;
};

/// Sums by part of the loss (Loss::part); there is one part unless the loss is a mix.
class StepSums {
 public:
  /// Initial values. The loss must outlive this object. `units`: for a loss that is_wide().
  StepSums(const Loss& loss, at::Device device, const std::optional<UnitLoss>& units);

  /// Whether forward passes must compute entropies, for metrics or for the loss.
  Entropies entropies() const;

  /// Adds entropies and objectives of token scope of a batch, and their metrics, to the sums. Returns their
  /// loss, in the graph; undefined if there are none. `logprobs` [M]: values_of_terms of the forward pass.
  at::Tensor add(const Batch& batch, const at::Tensor& logprobs, const ForwardResult& forwarded);

  /// Adds losses of wider scope and their metrics.
  void add(const std::vector<UnitLoss::PartValue>& values);

  /// [1 + metrics] float64 on the device: the loss, then each metric.
  const at::Tensor& values() const { return values_; }

  struct Read {
    double loss;
    std::vector<StepMetric> metrics;  // of parts with terms
  };
  /// Of all ranks. Synchronises with the device.
  Read read(const Group& group) const;

 private:
  /// Means are over the terms, or units, of the metric's part.
  struct SummedMetric {
    std::string name;
    Reduction reduction;
    int64_t part;
    double scale;
  };
  struct Part {
    int64_t first_metric;   // index in values_
    int64_t num_units;      // units with terms, for scopes wider than a token
    int64_t num_terms = 0;  // in the batches so far
  };
  /// Outputs of the LM head for the terms of a batch.
  struct HeadValues {
    const at::Tensor& logprobs;      // [M] float64, in the graph
    const at::Tensor& edge_entropy;  // [E], if entropies()
    TermTensors terms;
  };

  const ObjectiveOptions& options_of(int64_t part) const { return loss_->part(part).objective().options(); }
  bool reports_entropy(int64_t part) const {
    return options_of(part).entropy_coef != 0 || options_of(part).log_entropy;
  }
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
