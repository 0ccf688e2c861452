// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/distributions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "espalier/engine/logprob_pass.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/edge_distribution.h"
#include "espalier/ops/edge_logprobs/top_logprobs.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

/// A decoder whose log-probabilities are log softmax(logits / temperature). Keeps the most likely tokens of
/// the rows that its LM head is given.
class AtTemperature : public Model {
 public:
  AtTemperature(const Decoder& decoder, const DistributionOptions& options)
      : decoder_(decoder), options_(options) {}

  int64_t num_layers() const override { return decoder_.num_layers(); }
  int64_t vocab_size() const override { return decoder_.vocab_size(); }
  RouterShape routers() const override { return decoder_.routers(); }
  std::vector<int64_t> sliding_windows() const override { return decoder_.sliding_windows(); }
  at::Tensor embed(const at::Tensor& input_ids) const override { return decoder_.embed(input_ids); }
  PositionTables position_tables(const at::Tensor& position_ids) const override {
    return decoder_.position_tables(position_ids);
  }
  LayerOutput layer(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                    const SequenceOps& sequence, const at::Tensor& rows) const override {
    return decoder_.layer(index, hidden, tables, sequence, rows);
  }
  at::Tensor logprobs(const at::Tensor& hidden, const Edges& edges) const override {
    if (options_.temperature != 1 || edges.temperature.defined()) return distribution(hidden, edges).logprobs;
    keep_top(hidden);
    return decoder_.logprobs(hidden, edges);
  }
  EdgeDistribution distribution(const at::Tensor& hidden, const Edges& edges) const override {
    keep_top(hidden);
    const auto [rows, weight] = head_factors(hidden);
    const at::Tensor& temperature = edges.temperature;
    const at::ScalarType dtype = detail::accumulator_dtype(rows.scalar_type());
    return edge_distribution(rows, weight, edges.row, edges.target,
                             {.edge_temperature = temperature.defined() ? temperature.to(dtype) : temperature,
                              .temperature = options_.temperature,
                              .softcap = softcap()});
  }
  const std::vector<Parameter>& parameters() const override { return decoder_.parameters(); }
  at::Device device() const override { return decoder_.device(); }

  TopLogprobs take_top() { return std::exchange(top_, {}); }

 private:
  double softcap() const { return decoder_.config().final_logit_softcapping; }
  void keep_top(const at::Tensor& hidden) const {
    if (options_.top_k == 0) return;
    const auto [rows, weight] = head_factors(hidden);
    top_ = top_logprobs(rows, weight, options_.top_k, options_.temperature, softcap());
  }
  accumulating::HeadFactors head_factors(const at::Tensor& hidden) const {
    return accumulating::head_factors(decoder_.final_norm(hidden), decoder_.lm_head());
  }

  const Decoder& decoder_;
  const DistributionOptions& options_;
  mutable TopLogprobs top_;
};

/// Results of a micro-batch; copies to the host may be in flight.
struct Computed {
  TermValues logprobs, entropies, row;  // by the tokens' flat index; row: of `top`
  TopLogprobs top;                      // [R, K]
};

template <class T>
at::Tensor tensor_of(std::vector<T>* values) {
  return at::from_blob(values->data(), std::ssize(*values), c10::CppTypeToScalarType<T>::value);
}

}  // namespace

TokenDistributions compute_distributions(const Decoder& decoder, const Trajectories& trajectories,
                                         const Step& step, const DistributionOptions& options,
                                         const MicroBatchProgress& progress, const Group& group) {
  AtTemperature model(decoder, options);
  const Loss loss = options.at_row_temperatures ? Loss::at_row_temperatures(trajectories)
                                                : Loss(trajectories, ObjectiveOptions{});
  std::vector<Computed> all;
  const auto visit = [&](int64_t, const Batch& batch, const ForwardResult& forwarded) {
    Computed& computed = all.emplace_back();
    const auto by_token = [&](const at::Tensor& values) {
      return TermValues{batch.term_token, download(values)};
    };
    computed.logprobs = by_token(values_of_terms(batch, forwarded.logprobs));
    if (options.entropies) computed.entropies = by_token(values_of_terms(batch, forwarded.entropy));
    if (options.top_k == 0) return;
    computed.row = by_token(batch.edge_row.index_select(0, batch.term_edge));
    const TopLogprobs top = model.take_top();
    computed.top = {download(top.ids), download(top.logprobs)};
  };
  for_each_logprobs(model, step, loss, options.entropies ? Entropies::kDifferentiable : Entropies::kNone,
                    progress, visit, group);
  synchronize(decoder.device());

  std::vector<double> rows(group.size());  // of `top`, by rank
  for (const Computed& computed : all) {
    if (options.top_k > 0) rows[group.rank()] += static_cast<double>(computed.top.ids.size(0));
  }
  rows = group.add_up(rows);
  const auto own = rows.begin() + group.rank();
  auto row = static_cast<int64_t>(std::accumulate(rows.begin(), own, 0.0));
  const auto all_rows = static_cast<int64_t>(std::accumulate(own, rows.end(), static_cast<double>(row)));
  // Each rank has zeros for what the others add.
  TokenDistributions result;
  result.top_ids = at::zeros({all_rows, options.top_k}, at::kLong);
  result.top_logprobs = at::zeros({all_rows, options.top_k}, at::kDouble);
  result.logprobs.resize(trajectories.num_tokens());
  if (options.entropies) result.entropies.resize(trajectories.num_tokens());
  if (options.top_k > 0) result.top_row.resize(trajectories.num_tokens());
  for (const Computed& computed : all) {
    computed.logprobs.write(&result.logprobs);
    if (options.entropies) computed.entropies.write(&result.entropies);
    if (options.top_k == 0) continue;
    computed.row.write(&result.top_row, row + 1);
    const int64_t count = computed.top.ids.size(0);
    result.top_ids.narrow(0, row, count).copy_(computed.top.ids);
    result.top_logprobs.narrow(0, row, count).copy_(computed.top.logprobs);
    row += count;
  }
  group.add_up({tensor_of(&result.logprobs), tensor_of(&result.entropies), result.top_logprobs});
  group.add_up({tensor_of(&result.top_row), result.top_ids});
  for (int64_t& each : result.top_row) --each;
  return result;
}

TopTokens top_tokens(const TokenDistributions& distributions) {
  const int64_t k = distributions.top_ids.size(1);
  TopTokens top{std::vector<int32_t>(distributions.top_row.size() * k, -1), {}};
  top.logprobs.resize(top.ids.size());
  for (size_t token = 0; token < distributions.top_row.size(); ++token) {
    const int64_t row = distributions.top_row[token], to = static_cast<int64_t>(token) * k;
    if (row < 0) continue;  // nothing predicts it
    std::copy_n(distributions.top_ids.const_data_ptr<int64_t>() + row * k, k, top.ids.begin() + to);
    std::copy_n(distributions.top_logprobs.const_data_ptr<double>() + row * k, k, top.logprobs.begin() + to);
  }
  return top;
}

}  // namespace espalier
