// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/evaluate.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

#include "espalier/engine/logprob_pass.h"
#include "espalier/engine/step_sums.h"
#include "espalier/engine/unit_loss.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

/// Of log-probabilities by their places in Step::terms.values. Added up in the order of the terms, which does
/// not depend on how the trees are cut.
double nll_per_token(const Step& step, const Trajectories& trajectories,
                     const std::vector<TermValues>& computed) {
  std::vector<double> logprobs(step.terms.values.size());
  for (const TermValues& values : computed) values.write(&logprobs);
  double sum = 0, weights = 0;
  for (size_t k = 0; k < step.rows.size(); ++k) {
    const int64_t first = trajectories.offsets[step.rows[k]];
    for (int64_t i = step.terms.offsets[k]; i < step.terms.offsets[k + 1]; ++i) {
      const double weight = trajectories.loss_weights[first + step.terms.values[i].position];
      sum -= weight * logprobs[i];
      weights += weight;
    }
  }
  return sum / weights;
}

}  // namespace

StepResult evaluate(const Model& model, const Step& step, const Loss& loss,
                    const MicroBatchProgress& progress) {
  std::optional<UnitLoss> unit_loss = make_unit_loss(step, loss, model.device());
  StepSums sums(loss, model.device(), unit_loss);
  StepCounts counts(step);
  std::vector<TermValues> computed;
  const auto visit = [&](int64_t, const Batch& batch, const ForwardResult& forwarded) {
    const at::Tensor logprobs = values_of_terms(batch, forwarded.logprobs);
    counts.terms += batch.num_terms();
    sums.add(batch, logprobs, forwarded);
    if (unit_loss) unit_loss->add(batch, logprobs);
    computed.push_back({batch.term_index, download(logprobs)});
  };
  counts.work.tokens = for_each_logprobs(model, step, loss, sums.entropies(), progress, visit);
  if (unit_loss) sums.add(unit_loss->evaluate_all());
  synchronize(model.device());
  auto [value, metrics] = sums.read();
  metrics.push_back({"nll_per_token", nll_per_token(step, loss.trajectories(), computed)});
  return {counts, {}, value, std::move(metrics)};
}

}  // namespace espalier
