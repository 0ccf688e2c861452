// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/distributions.h"

#include <ATen/ATen.h>

#include <algorithm>
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
    top_ = top_logprobs(decoder_.final_norm(hidden), decoder_.lm_head_weight(), top_k_, temperature_,
                        decoder_.config().final_logit_softcapping);
  }

  const Decoder& decoder_;
  double temperature_;
  int64_t top_k_;
  mutable TopLogprobs top_;
};

/// Results of a micro-batch; copies to the host may be in flight.
struct Computed {
  TermValues logprobs, entropies, row;  // by the tokens' flat index; row: of `top`
  TopLogprobs top;                      // [R, K]
};

}  // namespace

TokenDistributions compute_distributions(const Decoder& decoder, const Trajectories& trajectories,
                                         const Step& step, const DistributionOptions& options,
                                         const MicroBatchProgress& progress) {
  WithTopTokens model(decoder, options.temperature, options.top_k);
  const Loss loss(trajectories, ObjectiveOptions{});  // sft reads nothing but the tokens
  std::vector<Computed> all;
  const auto visit = [&](int64_t, const Batch& batch, const ForwardResult& forwarded) {
    Computed& computed = all.emplace_back();
    const auto of_tokens = [&](const at::Tensor& values) {
      return TermValues{batch.term_token, download(values)};
    };
    computed.logprobs = of_tokens(values_of_terms(batch, forwarded.logprobs));
    if (options.entropies) computed.entropies = of_tokens(values_of_terms(batch, forwarded.entropy));
    if (options.top_k == 0) return;
    computed.row = of_tokens(batch.edge_row.index_select(0, batch.term_edge));
    const TopLogprobs top = model.take_top();
    computed.top = {download(top.ids), download(top.logprobs)};
  };
  for_each_logprobs(model, step, loss, options.entropies ? Entropies::kDifferentiable : Entropies::kNone,
                    progress, visit);
  synchronize(decoder.device());

  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  TokenDistributions result;
  result.logprobs.assign(trajectories.num_tokens(), kNone);
  if (options.entropies) result.entropies.assign(trajectories.num_tokens(), kNone);
  if (options.top_k > 0) result.top_row.assign(trajectories.num_tokens(), -1);
  std::vector<at::Tensor> ids, logprobs;
  int64_t rows_before = 0;
  for (const Computed& computed : all) {
    computed.logprobs.write(&result.logprobs);
    if (options.entropies) computed.entropies.write(&result.entropies);
    if (options.top_k == 0) continue;
    computed.row.write(&result.top_row, rows_before);
    rows_before += computed.top.ids.size(0);
    ids.push_back(computed.top.ids);
    logprobs.push_back(computed.top.logprobs);
  }
  check_token_values(trajectories, result.logprobs, "log-probability");
  if (options.entropies) check_token_values(trajectories, result.entropies, "entropy");
  if (!ids.empty()) {
    result.top_ids = at::cat(ids);
    result.top_logprobs = at::cat(logprobs);
  }
  return result;
}

TopTokens top_tokens(const TokenDistributions& distributions) {
  const int64_t k = distributions.top_ids.size(1);
  const at::Tensor logprobs = distributions.top_logprobs.to(at::kDouble);
  TopTokens top{std::vector<int32_t>(distributions.top_row.size() * k, -1), {}};
  top.logprobs.resize(top.ids.size());
  for (size_t token = 0; token < distributions.top_row.size(); ++token) {
    const int64_t row = distributions.top_row[token], to = static_cast<int64_t>(token) * k;
    if (row < 0) continue;  // nothing predicts it
    std::copy_n(distributions.top_ids.const_data_ptr<int64_t>() + row * k, k, top.ids.begin() + to);
    std::copy_n(logprobs.const_data_ptr<double>() + row * k, k, top.logprobs.begin() + to);
  }
  return top;
}

}  // namespace espalier
