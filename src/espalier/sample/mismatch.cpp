// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/mismatch.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/ops/edge_logprobs/edge_distribution.h"

namespace espalier {
namespace {

constexpr int64_t kCheckedTokens = 4096;

}  // namespace

at::Tensor AtTemperature::logprobs(const at::Tensor& hidden, const Edges& edges) const {
  return temperature_ == 1 ? decoder_.logprobs(hidden, edges) : distribution(hidden, edges).logprobs;
}

EdgeDistribution AtTemperature::distribution(const at::Tensor& hidden, const Edges& edges) const {
  return edge_distribution(
      decoder_.final_norm(hidden), decoder_.lm_head_weight(), edges.row, edges.target,
      {.temperature = temperature_, .softcap = decoder_.config().final_logit_softcapping});
}

Mismatch mismatch_of(const Decoder& decoder, const Trajectories& rows, double temperature,
                     const MicroBatchProgress& progress) {
  Mismatch mismatch{.rows = rows.num_rows()};
  const Step step =
      make_step(rows, {.plan = {.strategy = Strategy::kPartition, .token_budget = kCheckedTokens}});
  std::vector<double> computed(rows.num_tokens());
  compute_logprobs(AtTemperature(decoder, temperature == 0 ? 1 : temperature), rows, step, &computed,
                   progress);
  double sum = 0;
  for (int64_t row = 0; row < rows.num_rows(); ++row) {
    for (int64_t i = rows.offsets[row] + 1; i < rows.offsets[row + 1]; ++i) {
      if (rows.loss_weights[i] == 0) continue;
      const double difference = std::abs(rows.logprobs.values[i] - computed[i]);
      mismatch.largest = std::max(mismatch.largest, difference);
      sum += difference;
      ++mismatch.tokens;
    }
  }
  if (mismatch.tokens > 0) mismatch.mean = sum / static_cast<double>(mismatch.tokens);
  return mismatch;
}

}  // namespace espalier
