// SPDX-License-Identifier: Apache-2.0
#include "espalier/verify/reference_routers.h"

#include <ATen/ATen.h>

#include <vector>

#include "espalier/engine/batch.h"

namespace espalier {

at::Tensor hidden_of_row(const Decoder& decoder, const Trajectories& trajectories, int64_t row,
                         RouterRecord* record) {
  const at::Device device = decoder.device();
  const auto ids = trajectories.row(row);
  const auto size = static_cast<int64_t>(ids.size());
  const at::Tensor input_ids = at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong).to(device);
  const at::Tensor position_ids = at::arange(size, at::TensorOptions(device).dtype(at::kLong));
  RouterContext context{.record = record};
  if (decoder.routers().count() > 0 && trajectories.routes_per_token > 0) {
    const auto routes = recorded_routes(trajectories, trajectories.offsets[row], size, decoder.routers());
    context.routes = at::tensor(routes, at::kLong).view({size, trajectories.routes_per_token}).to(device);
  }
  return decoder.forward(input_ids, position_ids, CausalSequence(size, context));
}

Trajectories with_routes(const Trajectories& trajectories, const Decoder& decoder) {
  const RouterShape routers = decoder.routers();
  if (routers.count() == 0 || trajectories.routes_per_token > 0) return trajectories;
  const at::NoGradGuard no_grad;
  std::vector<int32_t> routes;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (trajectories.row_size(row) == 0) continue;
    RouterRecord record;
    hidden_of_row(decoder, trajectories, row, &record);
    const at::Tensor row_experts = at::cat(record.experts, 1).to(at::kInt).cpu().contiguous();
    const int32_t* first = row_experts.const_data_ptr<int32_t>();
    routes.insert(routes.end(), first, first + row_experts.numel());
  }
  Trajectories result = trajectories;
  result.routes_per_token = routers.count() * routers.top_k;
  result.routed_experts = Column<int32_t>(std::move(routes));
  return result;
}

ReferenceRouters::ReferenceRouters(const Decoder& decoder, const Trajectories& trajectories,
                                   const ObjectiveOptions& options)
    : options_(options),
      sigmoid_(decoder.config().moe() != nullptr && decoder.config().moe()->scores == RouterScores::kSigmoid),
      num_experts_(decoder.routers().experts),
      rows_(static_cast<double>(decoder.routers().count() * trajectories.num_tokens())) {
  if (options.router_aux_loss_coef == 0) return;
  const at::NoGradGuard no_grad;
  RouterRecord record;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (trajectories.row_size(row) > 0) hidden_of_row(decoder, trajectories, row, &record);
  }
  share_of_expert_ = at::cat(record.experts).flatten().bincount({}, num_experts_).to(at::kDouble) / rows_;
}

at::Tensor ReferenceRouters::probabilities(const at::Tensor& logits) const {
  if (!sigmoid_) return at::softmax(logits, -1);
  return at::sigmoid(logits) / at::sigmoid(logits).sum(-1, true);
}

at::Tensor ReferenceRouters::share(const RouterRecord& record) const {
  const at::Tensor logits = at::cat(record.logits).to(at::kDouble);
  at::Tensor losses = at::zeros({}, logits.options());
  if (options_.router_aux_loss_coef != 0) {
    const at::Tensor mean_probability = probabilities(logits).sum(0) / rows_;
    losses = losses + (share_of_expert_ * mean_probability).sum() * static_cast<double>(num_experts_) *
                          options_.router_aux_loss_coef;
  }
  if (options_.router_z_loss_coef != 0) {
    losses = losses + at::logsumexp(logits, -1).pow(2).sum() / rows_ * options_.router_z_loss_coef;
  }
  return losses;
}

}  // namespace espalier
