// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/router_statistics.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "espalier/ops/elementwise/activations.h"

namespace espalier {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor router_probabilities(const at::Tensor& logits, bool sigmoid) {
  if (!sigmoid) return logits.softmax(-1);
  const at::Tensor scores = espalier::sigmoid(logits);
  return scores / scores.sum(-1, /*keepdim=*/true);
}

/// The identity, whose backward adds the gradient of the losses.
class WithLosses : public torch::autograd::Function<WithLosses> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& multiplicity,
                            bool sigmoid, const c10::intrusive_ptr<RouterStatistics>& statistics) {
    ctx->save_for_backward({logits, multiplicity});
    ctx->saved_data["sigmoid"] = sigmoid;
    ctx->saved_data["statistics"] = c10::IValue::make_capsule(statistics);
    return logits.view_as(logits);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto statistics =
        c10::static_intrusive_pointer_cast<RouterStatistics>(ctx->saved_data["statistics"].toCapsule());
    const variable_list saved = ctx->get_saved_variables();
    const at::AutoGradMode with_grad(true);
    const at::Tensor logits = saved[0].detach().requires_grad_();
    const at::Tensor losses = statistics->losses_of(logits, ctx->saved_data["sigmoid"].toBool(), saved[1]);
    const at::Tensor grad = torch::autograd::grad({losses}, {logits})[0];
    return {grads[0] + grad, {}, {}, {}};
  }
};

}  // namespace

RouterStatistics::RouterStatistics(const RouterShape& shape, const RouterLossOptions& options,
                                   int64_t num_tokens, at::Device device)
    : shape_(shape),
      options_(options),
      rows_(static_cast<double>(shape.count()) * static_cast<double>(num_tokens)) {
  const auto doubles = at::TensorOptions(device).dtype(at::kDouble);
  counts_ = at::zeros({shape.count(), shape.experts}, doubles);
  probabilities_ = at::zeros({shape.experts}, doubles);
  z_ = at::zeros({}, doubles);
}

void RouterStatistics::add(int64_t router, const at::Tensor& logits, bool sigmoid, const at::Tensor& experts,
                           const at::Tensor& multiplicity) {
  if (!counting_) return;
  const at::NoGradGuard no_grad;
  // Sums of integers are exact, so atomics are deterministic.
  counts_.select(0, router).index_add_(0, experts.flatten(), multiplicity.repeat_interleave(experts.size(1)));
  if (options_.aux_coef != 0) {
    const at::Tensor probabilities = router_probabilities(logits, sigmoid).to(at::kDouble);
    probabilities_ += (probabilities * multiplicity.unsqueeze(1)).sum(0);
  }
  if (options_.z_coef != 0) z_ += (logits.to(at::kDouble).logsumexp(-1).square() * multiplicity).sum();
}

at::Tensor RouterStatistics::with_losses(const at::Tensor& logits, bool sigmoid,
                                         const at::Tensor& multiplicity) {
  if (!options_.any()) return logits;
  return WithLosses::apply(logits, multiplicity, sigmoid,
                           c10::intrusive_ptr<RouterStatistics>::reclaim_copy(this));
}

at::Tensor RouterStatistics::losses_of(const at::Tensor& logits, bool sigmoid,
                                       const at::Tensor& multiplicity) const {
  at::Tensor token_losses = at::zeros_like(multiplicity);
  if (options_.aux_coef != 0) {
    const double factor = options_.aux_coef * static_cast<double>(shape_.experts) / (rows_ * rows_);
    const at::Tensor price = counts_.sum(0) * factor;
    token_losses = token_losses + router_probabilities(logits, sigmoid).to(at::kDouble).mul(price).sum(-1);
  }
  if (options_.z_coef != 0) {
    token_losses = token_losses + logits.to(at::kDouble).logsumexp(-1).square() * (options_.z_coef / rows_);
  }
  return token_losses.dot(multiplicity);
}

at::Tensor RouterStatistics::values() const {
  const double experts = static_cast<double>(shape_.experts);
  const at::Tensor aux = counts_.sum(0).dot(probabilities_) * (experts / (rows_ * rows_));
  return at::cat({at::stack({aux, z_ / rows_}), counts_.flatten()});
}

RouterReport RouterStatistics::report(const at::Tensor& values, const RouterShape& shape) {
  const double* value = values.const_data_ptr<double>();
  RouterReport report{.aux_loss = value[0], .z_loss = value[1]};
  bool is_first = true;
  for (int64_t router = 0; router < shape.count(); ++router) {
    const double* counts = value + 2 + router * shape.experts;
    double sum = 0;
    for (int64_t e = 0; e < shape.experts; ++e) sum += counts[e];
    if (sum == 0) continue;
    const auto [least, most] = std::minmax_element(counts, counts + shape.experts);
    const double mean = sum / static_cast<double>(shape.experts);
    report.load_max = std::max(report.load_max, *most / mean);
    report.load_min = is_first ? *least / mean : std::min(report.load_min, *least / mean);
    is_first = false;
  }
  return report;
}

}  // namespace espalier
