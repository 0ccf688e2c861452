// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/logprob_pass.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/hash.h"
#include "espalier/engine/batch.h"
#include "espalier/runtime/device.h"

namespace espalier {

std::unique_ptr<accumulating::UpcastWeights> upcast_weights(const std::vector<bool>& runs) {
  if (std::ranges::count(runs, true) < 2) return nullptr;
  return std::make_unique<accumulating::UpcastWeights>();
}

Batch batch_for(const Model& model, const Step& step, int64_t m, const Loss& loss) {
  Batch batch = make_batch(step, m, loss);
  const RouterShape routers = model.routers();
  if (routers.count() > 0) set_router_inputs(step, m, loss.trajectories(), routers, &batch);
  return to_device(std::move(batch), model.device());
}

std::vector<bool> part_of_rank(const Step& step, std::vector<bool> runs, const Group& group) {
  Hasher hasher;
  hasher.add_values(std::span<const int32_t>(step.forest.tokens));
  hasher.add_values(std::span<const int64_t>(step.forest.end_node));
  int64_t chains = 0;
  for (size_t m = 0; m < runs.size(); ++m) {
    const MicroBatch& micro_batch = step.plan.micro_batches[m];
    hasher.add_values(std::span<const int64_t>({micro_batch.parent, micro_batch.num_tokens}));
    if (runs[m]) {
      runs[m] = micro_batch.parent < 0 ? chains++ % group.size() == group.rank() : runs[micro_batch.parent];
    }
  }
  group.check_equal("the rows and their plan", hasher.digits());
  return runs;
}

void check_finite(const Trajectories& trajectories, const std::vector<double>& values,
                  const std::string& what) {
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    for (int64_t t = 1; t < trajectories.row_size(row); ++t) {
      const double value = values[trajectories.offsets[row] + t];
      ESPALIER_CHECK(std::isfinite(value),
                     "trajectory {}: the {} of token {} is {}: expected a finite number",
                     trajectories.name(row), what, t, value);
    }
  }
}

void compute_logprobs(const Model& model, const Trajectories& trajectories, const Step& step,
                      std::vector<double>* logprobs, const MicroBatchProgress& progress, const Group& group) {
  compute_logprobs(model, Loss(trajectories, ObjectiveOptions{}), step, logprobs, progress, group);
}

void compute_logprobs(const Model& model, const Loss& loss, const Step& step, std::vector<double>* logprobs,
                      const MicroBatchProgress& progress, const Group& group) {
  const Loss tokens = loss.of_tokens();
  std::vector<TermValues> computed;
  const auto visit = [&](int64_t, const Batch& batch, const ForwardResult& forwarded) {
    computed.push_back({batch.term_token, download(values_of_terms(batch, forwarded.logprobs))});
  };
  group.together([&] {
    for_each_logprobs(model, step, tokens, Entropies::kNone, progress, visit, group);
    synchronize(model.device());
    return true;
  });
  for (const TermValues& values : computed) values.write(logprobs);
  group.add_up({at::from_blob(logprobs->data(), std::ssize(*logprobs), at::kDouble)});
}

}  // namespace espalier
