// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/optimizer/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "espalier/model/model.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/train_options.h"

namespace espalier {

int64_t optimizer_bytes(OptimizerKind kind, at::ScalarType dtype) {
  const int64_t state = dtype == at::kDouble ? 8 : 4, masters = dtype == at::kBFloat16 ? state : 0;
  return masters + (kind == OptimizerKind::kAdamW ? 2 * state : 0);
}

double schedule_factor(SchedulerKind kind, int64_t step, int64_t steps, int64_t warmup_steps) {
  if (step < warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(warmup_steps + 1);
  if (kind == SchedulerKind::kConstant) return 1;
  const double progress = static_cast<double>(step - warmup_steps) /
                          static_cast<double>(std::max<int64_t>(1, steps - warmup_steps));
  if (kind == SchedulerKind::kLinear) return 1 - progress;
  return 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

Optimizer::Optimizer(const Decoder& decoder, const OptimizerOptions& options)
    : decoder_(&decoder),
      options_(options),
      steps_done_(at::zeros({}, at::TensorOptions(decoder.device()).dtype(at::kFloat))) {
  check_optimizer_options(options);
  const at::NoGradGuard no_grad;
  for (const Parameter& parameter : decoder.parameters()) {
    const at::Tensor value = parameter.value.detach();
    masters_.push_back(value.scalar_type() == at::kBFloat16 ? value.to(at::kFloat) : value);
    if (options.kind == OptimizerKind::kAdamW) {
      exp_avgs_.push_back(at::zeros_like(masters_.back()));
      exp_avg_sqs_.push_back(at::zeros_like(masters_.back()));
    }
  }
}

namespace {

// AdamW update of parameters with equal weight decay.
void adamw_group(const OptimizerOptions& options, double learning_rate, double weight_decay,
                 const std::vector<size_t>& members, const std::vector<at::Tensor>& gradients,
                 std::vector<at::Tensor>& masters, std::vector<at::Tensor>& exp_avgs,
                 std::vector<at::Tensor>& exp_avg_sqs, const at::Tensor& steps_done) {
  if (members.empty()) return;
  std::vector<at::Tensor> p, g, m, v, steps(members.size(), steps_done);
  for (const size_t i : members) {
    p.push_back(masters[i]);
    g.push_back(gradients[i]);
    m.push_back(exp_avgs[i]);
    v.push_back(exp_avg_sqs[i]);
  }
  at::_fused_adamw_(p, g, m, v, {}, steps, learning_rate, options.beta1, options.beta2, weight_decay,
                    options.eps, /*amsgrad=*/false, /*maximize=*/false);
}

/// Fused biases of experts have two dimensions, but are not matrices.
bool is_matrix(const Parameter& parameter) {
  return parameter.value.dim() >= 2 && !parameter.name.ends_with("bias");
}

}  // namespace

double Optimizer::gradient_norm() const {
  RECORD_USER_SCOPE("optimizer");
  const at::NoGradGuard no_grad;
  return global_norm(decoder_->gradients());
}

void Optimizer::check_update(double learning_rate, double norm) const {
  if (!std::isfinite(norm))
    throw NonFiniteError(fmt::format("the gradient norm is {}: expected a finite number", norm));
  const double clipped = options_.max_grad_norm > 0 ? std::min(norm, options_.max_grad_norm) : norm;
  const double largest = masters_.front().scalar_type() == at::kDouble ? std::numeric_limits<double>::max()
                                                                       : std::numeric_limits<float>::max();
  // No gradient exceeds the norm, and AdamW moves no weight by more than this multiple of the learning rate:
  // m / sqrt(v) <= (1 - beta1) / sqrt(1 - beta2), or 1 with the bias correction of the first steps.
  const bool adamw = options_.kind == OptimizerKind::kAdamW;
  const double reach = adamw ? std::max(1.0, (1 - options_.beta1) / std::sqrt(1 - options_.beta2)) : clipped;
  if (!(learning_rate * reach < largest) || (adamw && !(clipped < std::sqrt(largest)))) {
    throw NonFiniteError(fmt::format(
        "the update would overflow {}: learning rate {:g}, gradient norm {:g}, after clipping {:g}",
        dtype_name(masters_.front().scalar_type()), learning_rate, norm, clipped));
  }
}

void Optimizer::update(double learning_rate, double norm) {
  RECORD_USER_SCOPE("optimizer");
  check_update(learning_rate, norm);
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> sums = decoder_->gradients();
  if (options_.max_grad_norm > 0 && norm > options_.max_grad_norm) {
    std::vector<at::Tensor> defined = sums;
    std::erase_if(defined, [](const at::Tensor& sum) { return !sum.defined(); });
    at::_foreach_mul_(defined, options_.max_grad_norm / (norm + 1e-6));
  }
  std::vector<size_t> decayed, plain;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (!sums[i].defined()) continue;
    const bool decays = options_.weight_decay > 0 && is_matrix(decoder_->parameters()[i]);
    (decays ? decayed : plain).push_back(i);
  }
  steps_done_.add_(1);
  if (options_.kind == OptimizerKind::kAdamW) {
    adamw_group(options_, learning_rate, options_.weight_decay, decayed, sums, masters_, exp_avgs_,
                exp_avg_sqs_, steps_done_);
    adamw_group(options_, learning_rate, 0, plain, sums, masters_, exp_avgs_, exp_avg_sqs_, steps_done_);
  } else {
    for (const size_t i : decayed) masters_[i].mul_(1 - learning_rate * options_.weight_decay);
    for (const auto* members : {&decayed, &plain}) {
      for (const size_t i : *members) masters_[i].add_(sums[i], -learning_rate);
    }
  }
  round_masters();
}

void Optimizer::round_masters() const {
  if (decoder_->parameters().front().value.scalar_type() != at::kBFloat16) return;
  std::vector<at::Tensor> values;
  for (const Parameter& parameter : decoder_->parameters()) values.push_back(parameter.value.detach());
  at::_foreach_copy_(values, masters_);
}

std::vector<Optimizer::Named> Optimizer::state() const {
  std::vector<Named> state{{"step", steps_done_.view({1})}};
  for (size_t i = 0; i < masters_.size(); ++i) {
    const Parameter& parameter = decoder_->parameters()[i];
    if (parameter.value.scalar_type() == at::kBFloat16)
      state.push_back({"master." + parameter.name, masters_[i]});
    if (options_.kind == OptimizerKind::kAdamW) {
      state.push_back({"exp_avg." + parameter.name, exp_avgs_[i]});
      state.push_back({"exp_avg_sq." + parameter.name, exp_avg_sqs_[i]});
    }
  }
  return state;
}

Optimizer Optimizer::copy_for(const Decoder& decoder) const {
  Optimizer copy = *this;
  copy.decoder_ = &decoder;
  const auto to_host = [](at::Tensor& tensor) {
    tensor = tensor.to(at::kCPU, tensor.scalar_type(), false, true);
  };
  to_host(copy.steps_done_);
  std::ranges::for_each(copy.exp_avgs_, to_host);
  std::ranges::for_each(copy.exp_avg_sqs_, to_host);
  for (size_t i = 0; i < masters_.size(); ++i) {
    const at::Tensor value = decoder.parameters()[i].value;
    if (value.scalar_type() == at::kBFloat16) {
      to_host(copy.masters_[i]);
    } else {
      copy.masters_[i] = value.detach();
    }
  }
  return copy;
}

std::string Optimizer::nonfinite_state() const {
  for (const Named& entry : state()) {
    const std::string fault = nonfinite_text(entry.tensor);
    if (!fault.empty()) return fmt::format("`{}` {}", entry.name, fault);
  }
  return "";
}

void Optimizer::save(const std::filesystem::path& file) const {
  if (const std::string fault = nonfinite_state(); !fault.empty())
    throw NonFiniteError(fmt::format("optimiser state: {}", fault));
  std::vector<at::Tensor> keep;
  std::vector<TensorView> views;
  for (const Named& entry : state()) {
    keep.push_back(entry.tensor.cpu());
    views.push_back(view_tensor(entry.name, keep.back()));
  }
  write_safetensors(file, views);
}

void Optimizer::load(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  const std::vector<Named> expected = state();
  ESPALIER_CHECK(file.tensors().size() == expected.size(),
                 "{}: expected the state of the same optimizer and dtype ({} tensors), received {} tensors",
                 path.string(), expected.size(), file.tensors().size());
  for (const Named& entry : expected) read_tensor(file, entry.name, entry.tensor);
  // Only bfloat16 models have separate masters; other weights are loaded from the checkpoint.
  const at::NoGradGuard no_grad;
  round_masters();
}

}  // namespace espalier
