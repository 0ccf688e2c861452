// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/optimizer/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "espalier/model/model.h"
#include "espalier/model/weights/rank_files.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/train/train_options.h"

namespace espalier {

double optimizer_bytes(OptimizerKind kind, at::ScalarType dtype, int64_t ranks) {
  const int64_t state = dtype == at::kDouble ? 8 : 4, masters = dtype == at::kBFloat16 ? state : 0;
  const int64_t all = masters + (kind == OptimizerKind::kAdamW ? 2 * state : 0);
  return static_cast<double>(all) / static_cast<double>(ranks);
}

double schedule_factor(SchedulerKind kind, int64_t step, int64_t steps, int64_t warmup_steps) {
  if (step < warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(warmup_steps + 1);
  if (kind == SchedulerKind::kConstant) return 1;
  const double progress = static_cast<double>(step - warmup_steps) /
                          static_cast<double>(std::max<int64_t>(1, steps - warmup_steps));
  if (kind == SchedulerKind::kLinear) return 1 - progress;
  return 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

Optimizer::Optimizer(const Decoder& decoder, const OptimizerOptions& options, const Group& group)
    : decoder_(&decoder),
      group_(&group),
      options_(options),
      steps_done_(at::zeros({}, at::TensorOptions(decoder.device()).dtype(at::kFloat))) {
  check_optimizer_options(options);
  const at::NoGradGuard no_grad;
  for (const Parameter& parameter : decoder.parameters()) {
    const at::Tensor value = group.part(parameter.value.detach());
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

void check_state(const std::string& name, const at::Tensor& tensor) {
  if (const std::string fault = nonfinite_text(tensor); !fault.empty())
    throw NonFiniteError(fmt::format("optimiser state: `{}` {}", name, fault));
}

/// Numbers that a dtype can hold.
struct Range {
  double smallest, largest;  // above 0 with full precision, and of all
};

template <class Scalar>
Range range_of() {
  return {static_cast<double>(std::numeric_limits<Scalar>::min()),
          static_cast<double>(std::numeric_limits<Scalar>::max())};
}

Range range_of(at::ScalarType dtype) {
  if (dtype == at::kDouble) return range_of<double>();
  return dtype == at::kBFloat16 ? range_of<at::BFloat16>() : range_of<float>();
}

/// AdamW moves no weight by more than this multiple of the learning rate. By the Cauchy-Schwarz inequality
/// m / sqrt(v) <= (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), or 1 in the first steps. Where
/// squares of gradients are too small for the dtype, eps alone is below m; where beta1^2 >= beta2, it may be
/// so for any m.
double adamw_reach(const OptimizerOptions& options, const Range& range) {
  const double ratio = options.beta1 * options.beta1 / options.beta2;
  const double by_eps = std::sqrt(range.largest) / options.eps;  // no step with larger gradients is taken
  if (!(ratio < 1)) return by_eps;
  const double by_squares = std::max(1.0, (1 - options.beta1) / std::sqrt((1 - options.beta2) * (1 - ratio)));
  const double without_squares = std::sqrt(4 * range.smallest / (1 - options.beta2)) / options.eps;
  return std::min(by_eps, by_squares * (2 + without_squares));
}

/// Fused biases of experts have two dimensions, but are not matrices.
bool is_matrix(const Parameter& parameter) {
  return parameter.value.dim() >= 2 && !parameter.name.ends_with("bias");
}

}  // namespace

std::vector<at::Tensor> Optimizer::gradients() const {
  std::vector<at::Tensor> parts = decoder_->gradients();
  for (at::Tensor& part : parts) {
    if (part.defined()) part = group_->part(part);
    if (part.defined() && part.numel() == 0) part.reset();
  }
  return parts;
}

double Optimizer::gradient_norm() const {
  RECORD_USER_SCOPE("optimizer");
  const at::NoGradGuard no_grad;
  return global_norm(gradients());
}

void Optimizer::check_update(double learning_rate, double norm) const {
  if (!std::isfinite(norm))
    throw NonFiniteError(fmt::format("the gradient norm is {}: expected a finite number", norm));
  const double clipped = options_.max_grad_norm > 0 ? std::min(norm, options_.max_grad_norm) : norm;
  const at::ScalarType dtype = masters_.front().scalar_type();
  const bool adamw = options_.kind == OptimizerKind::kAdamW;
  const Range range = range_of(dtype);
  if (adamw && options_.eps < range.smallest) {
    throw NonFiniteError(
        fmt::format("the update would not be finite: eps {:g} is below {:g}, the smallest {} above 0",
                    options_.eps, range.smallest, dtype_name(dtype)));
  }
  // No gradient exceeds the norm.
  const double step = learning_rate * (adamw ? adamw_reach(options_, range) : clipped);
  if (!(step < range.largest) || (adamw && !(clipped < std::sqrt(range.largest)))) {
    throw NonFiniteError(fmt::format(
        "the update would overflow {}: learning rate {:g}, gradient norm {:g}, after clipping {:g}",
        dtype_name(dtype), learning_rate, norm, clipped));
  }
  // Steps of a usual size cannot take a weight that is finite out of the range.
  const double decay = std::abs(1 - learning_rate * options_.weight_decay);
  if (decay <= 1 && step < range.largest * 1e-8) return;
  double weight = 0;
  for (const at::Tensor& master : masters_) {
    if (master.numel() > 0) weight = std::max(weight, master.abs().max().item<double>());
  }
  weight = group_->reduce({weight}, {RankReduction::kMax}).front();
  const at::ScalarType stored = decoder_->parameters().front().value.scalar_type();
  if (!(decay * weight + step < range_of(stored).largest)) {
    throw NonFiniteError(fmt::format(
        "the update would overflow {}: learning rate {:g}, weight decay {:g}, largest weight {:g}",
        dtype_name(stored), learning_rate, options_.weight_decay, weight));
  }
}

void Optimizer::update(double learning_rate, double norm) {
  RECORD_USER_SCOPE("optimizer");
  check_update(learning_rate, norm);
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> sums = gradients();
  if (options_.max_grad_norm > 0 && norm > options_.max_grad_norm) {
    std::vector<at::Tensor> defined = sums;
    std::erase_if(defined, [](const at::Tensor& sum) { return !sum.defined(); });
    if (!defined.empty()) at::_foreach_mul_(defined, options_.max_grad_norm / (norm + 1e-6));
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
  for (const Parameter& parameter : decoder_->parameters())
    values.push_back(group_->part(parameter.value.detach()));
  at::_foreach_copy_(values, masters_);
}

std::vector<Optimizer::Divided> Optimizer::divided_state() const {
  std::vector<Divided> state;
  for (size_t i = 0; i < masters_.size(); ++i) {
    const auto& [name, value] = decoder_->parameters()[i];
    if (value.scalar_type() == at::kBFloat16) state.push_back({"master." + name, masters_[i], value.sizes()});
    if (options_.kind != OptimizerKind::kAdamW) continue;
    state.push_back({"exp_avg." + name, exp_avgs_[i], value.sizes()});
    state.push_back({"exp_avg_sq." + name, exp_avg_sqs_[i], value.sizes()});
  }
  return state;
}

OptimizerState Optimizer::state(bool gathers) const {
  OptimizerState state;
  if (group_->is_first()) state.push_back({"step", steps_done_.view({1}).cpu()});
  for (const auto& [name, part, shape] : divided_state()) {
    const at::Tensor value = gathers ? group_->whole(part, shape) : part;
    if (!gathers || group_->is_first()) state.push_back({name, value.cpu()});
  }
  return state;
}

void save_state(const OptimizerState& state, const std::filesystem::path& file) {
  std::vector<TensorView> views;
  for (const auto& [name, tensor] : state) {
    check_state(name, tensor);
    views.push_back(view_tensor(name, tensor));
  }
  write_safetensors(file, views);
}

void Optimizer::load(const std::filesystem::path& path) {
  const std::vector<SafetensorsFile> files = open_rank_files(path);
  ESPALIER_CHECK(!files.empty(), "{}: expected a file, or those of ranks, received none", path.string());
  const std::vector<Divided> expected = divided_state();
  for (const SafetensorsFile& file : files) {
    const size_t count = expected.size() + (&file == &files.front() ? 1 : 0);  // with the step
    ESPALIER_CHECK(file.tensors().size() == count,
                   "{}: expected the state of the same optimizer and dtype ({} tensors), received {} tensors",
                   file.path().string(), count, file.tensors().size());
  }
  read_tensor(files.front(), "step", steps_done_.view({1}));
  const at::NoGradGuard no_grad;
  for (const auto& [name, part, shape] : expected) {
    const at::Tensor own = at::empty(part.sizes(), part.options().device(at::kCPU));
    const int64_t begin = group_->part(at::empty(shape, at::kMeta)).storage_offset();
    read_part(files, name, shape, begin, own);
    check_state(name, own);
    part.copy_(own);
  }
  // Only bfloat16 models have separate masters; other weights are loaded from the checkpoint.
  round_masters();
}

}  // namespace espalier
