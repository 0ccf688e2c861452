// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/distributions.h"

#include <ATen/ATen.h>

#include <limits>
#include <utility>

#include "espalier/engine/logprob_pass.h"
#include "espalier/ops/edge_logprobs/top_logprobs.h"
#include "espalier/runtime/device.h"
#include "espalier/sample/mismatch.h"

namespace espalier {
namespace {

/// A decoder that also computes the most likely tokens of the rows passed to its LM head.
class WithTopTokens : public AtTemperature {
 public:
  WithTopTokens(const Decoder& decoder, double temperature, int64_t top_k)
      : AtTemperature(decoder, temperature), decoder_(decoder), temperature_(temperature), top_k_(top_k) {}

  at::Tensor logprobs(const at::Tensor& hidden, const Edges& edges) const override {
    keep_top(hidden);
    return AtTemperature::logprobs(hidden, edges);
  }
  EdgeDistribution distribution(const at::Tensor& hidden, const Edges& edges) const override {
    keep_top(hidden);
    return AtTemperature::distribution(hidden, edges);
  }

  TopLogprobs take_top() { return std::exchange(top_, {}); }

 private:
  void keep_top(const at::Tensor& hidden) const {
    if (top_k_ == 0 || top_.ids.defined()) return;
    top_ = top_logprobs(decoder_.final_norm(hidden), decoder_.lm_head_weight(), top_k_, temperature_);
  }

  const Decoder& decoder_;
  double temperature_;
  int64_t top_k_;
  mutable TopLogprobs top_;
};

/// Results of a micro-batch; copies to the host may be in flight.
struct Computed {
  std::vector<int64_t> token;           // [M] flat index
  at::Tensor logprobs, entropies, row;  // [M]; row: index into `top`
  TopLogprobs top;                      // [R, K]
};

template <class T>
void scatter(const at::Tensor& values, const std::vector<int64_t>& places, T offset, std::vector<T>* to) {
  const T* value = values.const_data_ptr<T>();
  for (size_t k = 0; k < places.size(); ++k) (*to)[places[k]] = value[k] + offset;
}

}  // namespace

TokenDistributions compute_distributions(const Decoder& decoder, const Trajectories& trajectories,
                                         const Step& step, const DistributionOptions& options,
                                         const MicroBatchProgress& progress) {
  WithTopTokens model(decoder, options.temperature, options.top_k);
  const Loss loss(trajectories, ObjectiveOptions{});  // sft reads only the tokens
  const std::vector<bool> active = micro_batches_with_loss(step);
  const auto upcast = upcast_weights(active);
  std::vector<Computed> results;
  const auto visit = [&](int64_t, const Batch& batch, const ForwardResult& forwarded) {
    Computed& computed = results.emplace_back();
    computed.token = batch.term_token;
    computed.logprobs = download(values_of_terms(batch, forwarded.logprobs));
    if (options.entropies) computed.entropies = download(values_of_terms(batch, forwarded.entropy));
    if (options.top_k == 0) return;
    computed.row = download(batch.edge_row.index_select(0, batch.term_edge));
    const TopLogprobs top = model.take_top();
    computed.top = {download(top.ids), download(top.logprobs)};
  };
  const auto total = static_cast<int64_t>(step.plan.micro_batches.size());
  int64_t done = 0;
  for_each_logprobs({.model = model,
                     .step = step,
                     .loss = loss,
                     .runs = active,
                     .entropies = options.entropies ? Entropies::kDifferentiable : Entropies::kNone},
                    visit, [&](int64_t) {
                      if (progress) progress(++done, total);
                    });
  synchronize(decoder.device());

  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  TokenDistributions result;
  result.logprobs.assign(trajectories.num_tokens(), kNone);
  if (options.entropies) result.entropies.assign(trajectories.num_tokens(), kNone);
  if (options.top_k > 0) result.top_row.assign(trajectories.num_tokens(), -1);
  std::vector<at::Tensor> ids, logprobs;
  int64_t rows_before = 0;
  for (const Computed& computed : results) {
    scatter(computed.logprobs, computed.token, 0.0, &result.logprobs);
    if (options.entropies) scatter(computed.entropies, computed.token, 0.0, &result.entropies);
    if (options.top_k == 0) continue;
    scatter(computed.row, computed.token, rows_before, &result.top_row);
    rows_before += computed.top.ids.size(0);
    ids.push_back(computed.top.ids);
    logprobs.push_back(computed.top.logprobs);
  }
  if (!ids.empty()) {
    result.top_ids = at::cat(ids);
    result.top_logprobs = at::cat(logprobs);
  }
  if (progress && done < total) progress(total, total);
  return result;
}

}  // namespace espalier
