// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/gradient_accumulation.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "espalier/model/row_adapters.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/arguments.h"
#include "espalier/ops/edge_logprobs/edge_logprobs.h"
#include "espalier/ops/elementwise/elementwise.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/ops/operator.h"

namespace espalier::accumulating {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// The dtype of sums: that of gradients and norms.
at::ScalarType sum_dtype(const at::Tensor& x) {
  return detail::accumulator_dtype(x.scalar_type());
}

/// The .grad of a parameter, in the dtype of sums; undefined if it was.
at::Tensor& sum_of(const at::Tensor& parameter) {
  at::Tensor& sum = at::Tensor(parameter).mutable_grad();
  if (sum.defined()) sum = sum.to(sum_dtype(parameter));  // autograd's own may be of the parameter's dtype
  return sum;
}

at::Tensor& sum_or_zeros(const at::Tensor& parameter) {
  at::Tensor& sum = sum_of(parameter);
  if (!sum.defined()) sum = at::zeros(parameter.sizes(), parameter.options().dtype(sum_dtype(parameter)));
  return sum;
}

/// The weight, or what UpcastWeights keeps of it.
at::Tensor operand_of(const at::Tensor& weight) {
  const at::ScalarType dtype = detail::product_dtype(weight);
  auto* kept = UpcastWeights::find();
  if (kept == nullptr || dtype == weight.scalar_type()) return weight;
  return kept->get(weight, [&] { return weight.to(dtype); });
}

/// detail::affine of a weight [N, K], which PreparedWeights or UpcastWeights may keep.
at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (const detail::PreparedWeight* ready = prepared(weight)) return ready->affine(x, bias);
  return detail::affine(x, operand_of(weight), bias);
}

/// x weight^T + bias in the dtype of sums, with what the adapters of rows add (RowAdapters).
at::Tensor unrounded_affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const detail::PreparedWeight* ready = prepared(weight);
  at::Tensor output =
      ready != nullptr ? ready->unrounded(x) : detail::unrounded_product(x, operand_of(weight).t());
  if (bias.defined()) output.add_(bias);
  if (const RowAdapters* rows = RowAdapterScope::find()) rows->add_to(output, x, weight);
  return output;
}

/// The same of a weight [K, N].
at::Tensor affine_of_stacked(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (const detail::PreparedWeight* ready = prepared(weight.t())) return ready->affine(x, bias);
  return detail::affine(x, operand_of(weight).t(), bias);
}

/// Adds a b to the .grad of a parameter.
void add_product(const at::Tensor& parameter, const at::Tensor& a, const at::Tensor& b) {
  RECORD_USER_SCOPE("gradient of weight");
  at::Tensor& sum = sum_of(parameter);
  if (sum.defined()) {
    detail::add_product(sum, a, b);
  } else {
    sum = detail::unrounded_product(a, b);
  }
}

/// Where the tensors of projections are in the list that autograd sees: all weights first. Autograd knows
/// nothing of structs.
struct Places {
  std::vector<int64_t> bias;     // of each projection, or -1
  std::vector<int64_t> adapter;  // of a, which b follows; or -1
  std::vector<double> scale;     // of adapters

  void save(AutogradContext* ctx) const {
    ctx->saved_data["bias"] = bias;
    ctx->saved_data["adapter"] = adapter;
    ctx->saved_data["scale"] = scale;
  }
  static Places saved(AutogradContext* ctx) {
    return {ctx->saved_data["bias"].toIntVector(), ctx->saved_data["adapter"].toIntVector(),
            ctx->saved_data["scale"].toDoubleVector()};
  }
};

class Linears : public Function<Linears> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::TensorList& parameters,
                               const Places& places) {
    const size_t count = places.bias.size();
    const at::Tensor operand = x.to(detail::product_dtype(x));
    const RowAdapters* rows = RowAdapterScope::find();
    const bool has_row_adapters = rows != nullptr && !rows->empty();
    variable_list outputs, inner(count);
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor bias = places.bias[i] < 0 ? at::Tensor() : parameters[places.bias[i]];
      const bool is_adapted = places.adapter[i] >= 0;
      const at::Tensor output = is_adapted || has_row_adapters
                                    ? unrounded_affine(operand, parameters[i], bias)
                                    : affine(operand, parameters[i], bias);
      if (is_adapted) {
        const at::Tensor &a = parameters[places.adapter[i]], &b = parameters[places.adapter[i] + 1];
        inner[i] = detail::affine(x.to(a.scalar_type()), a, {}).mul_(places.scale[i]);
        detail::add_product(output, inner[i], b.t());
      }
      outputs.push_back(output.to(x.scalar_type()));
    }
    const auto is_trained = [](const at::Tensor& parameter) { return parameter.requires_grad(); };
    const bool needs_x = std::any_of(parameters.begin(), parameters.begin() + count, is_trained) ||
                         std::ranges::any_of(inner, &at::Tensor::defined);
    variable_list saved{needs_x ? x : at::Tensor()};
    saved.insert(saved.end(), inner.begin(), inner.end());
    saved.insert(saved.end(), parameters.begin(), parameters.end());
    ctx->save_for_backward(std::move(saved));
    places.save(ctx);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    const Places places = Places::saved(ctx);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const auto inner = saved.begin() + 1, parameters = inner + static_cast<int64_t>(grads.size());
    const at::ScalarType dtype = grads.front().scalar_type(),
                         product_dtype = detail::product_dtype(grads.front());
    const at::Tensor operand = x.defined() ? x.to(product_dtype) : x;
    at::Tensor grad_x;
    for (size_t i = 0; i < grads.size(); ++i) {
      const at::Tensor& weight = parameters[static_cast<int64_t>(i)];
      const at::Tensor bias = places.bias[i] < 0 ? at::Tensor() : parameters[places.bias[i]];
      const at::Tensor grad = grads[i].to(product_dtype);
      if (weight.requires_grad()) add_product(weight, grad.t(), operand);
      if (bias.defined() && bias.requires_grad()) {
        add_gradient(bias, grad.sum({0}, /*keepdim=*/false, sum_dtype(bias)));
      }
      const bool is_adapted = places.adapter[i] >= 0;
      if (ctx->needs_input_grad(0)) {
        if (grads.size() == 1 && !is_adapted) {
          grad_x = detail::affine(grad, operand_of(weight).t(), {});  // nothing to add: rounded at once
        } else if (grad_x.defined()) {
          detail::add_product(grad_x, grad, operand_of(weight));
        } else {
          grad_x = detail::unrounded_product(grad, operand_of(weight));
        }
      }
      if (!is_adapted) continue;
      const at::Tensor &a = parameters[places.adapter[i]], &b = parameters[places.adapter[i] + 1];
      const at::Tensor wide = grads[i].to(b.scalar_type());
      const at::Tensor grad_inner = detail::affine(wide, b.t(), {}).mul_(places.scale[i]);
      if (b.requires_grad()) add_product(b, wide.t(), inner[static_cast<int64_t>(i)]);
      if (a.requires_grad()) add_product(a, grad_inner.t(), x.to(a.scalar_type()));
      if (grad_x.defined()) detail::add_product(grad_x, grad_inner, a);
    }
    variable_list all(1 + (saved.end() - parameters) + 1);
    if (grad_x.defined()) all[0] = grad_x.to(dtype);
    return all;
  }
};

class StackedLinear : public Function<StackedLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, int64_t index) {
    ctx->save_for_backward({x, weight, bias});
    ctx->saved_data["index"] = index;
    const at::Tensor operand = x.to(detail::product_dtype(x));
    return affine_of_stacked(operand, weight.select(0, index), bias.select(0, index)).to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const int64_t index = ctx->saved_data["index"].toInt();
    const at::Tensor operand = x.to(detail::product_dtype(x)), grad = grads[0].to(operand.scalar_type());
    if (weight.requires_grad()) {
      RECORD_USER_SCOPE("gradient of weight");
      detail::add_product(sum_or_zeros(weight).select(0, index), operand.t(), grad);
    }
    if (bias.requires_grad()) {
      sum_or_zeros(bias).select(0, index).add_(grad.sum({0}, /*keepdim=*/false, sum_dtype(bias)));
    }
    at::Tensor grad_x;
    if (ctx->needs_input_grad(0)) {
      grad_x = detail::affine(grad, operand_of(weight.select(0, index)), {}).to(x.scalar_type());
    }
    return {grad_x, {}, {}, {}};
  }
};

class UnroundedLinear : public Function<UnroundedLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({x, weight, bias.value_or(at::Tensor())});
    const at::ScalarType dtype = sum_dtype(x);
    return detail::affine(x.to(dtype), weight.to(dtype), bias ? bias->to(dtype) : at::Tensor());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &grad = grads[0];
    if (weight.requires_grad()) add_product(weight, grad.t(), x.to(grad.scalar_type()));
    if (bias.defined() && bias.requires_grad()) add_gradient(bias, grad.sum({0}));
    at::Tensor grad_x;
    if (ctx->needs_input_grad(0)) {
      grad_x = detail::unrounded_product(grad, weight.to(grad.scalar_type())).to(x.scalar_type());
    }
    return {grad_x, {}, {}};
  }
};

class Embedding : public Function<Embedding> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& input_ids,
                            int64_t frozen_row) {
    ctx->save_for_backward({weight, input_ids});
    ctx->saved_data["frozen_row"] = frozen_row;
    return at::embedding(weight, input_ids);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const int64_t frozen_row = ctx->saved_data["frozen_row"].toInt();
    at::Tensor& sum = sum_or_zeros(saved[0]);
    at::Tensor grad = grads[0].to(sum.scalar_type());
    if (frozen_row >= 0) grad = grad.masked_fill(saved[1].eq(frozen_row).unsqueeze(1), 0);
    sum.index_add_(0, saved[1], grad);
    return {{}, {}, {}};
  }
};

class Unrounded : public Function<Unrounded> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& parameter) {
    ctx->save_for_backward({parameter});
    return parameter.to(sum_dtype(parameter), /*non_blocking=*/false, /*copy=*/true);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    add_gradient(ctx->get_saved_variables()[0], grads[0]);
    return {{}};
  }
};

/// What x / rms(x) is multiplied by.
at::Tensor norm_scale(const at::Tensor& x, const at::Tensor& weight, bool zero_centered) {
  return zero_centered ? weight.to(sum_dtype(weight)) + 1 : weight.to(x.scalar_type());
}

/// A norm whose scale is in the dtype of sums works in it.
RmsNormOutput norm_of(const at::Tensor& x, const std::optional<at::Tensor>& addend, const at::Tensor& scale,
                      double eps) {
  if (scale.scalar_type() == x.scalar_type()) return rms_norm_forward(x, addend, scale, eps);
  const at::Tensor sum = addend ? x + *addend : x;
  RmsNormOutput output = rms_norm_forward(sum.to(scale.scalar_type()), std::nullopt, scale, eps);
  return {output.y.to(x.scalar_type()), sum, output.inverse_rms};
}

class RmsNorm : public Function<RmsNorm> {
 public:
  /// y, and x + addend where there is one.
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x,
                               const std::optional<at::Tensor>& addend, const at::Tensor& weight, double eps,
                               bool zero_centered) {
    const RmsNormOutput output = norm_of(x, addend, norm_scale(x, weight, zero_centered), eps);
    ctx->saved_data["zero_centered"] = zero_centered;
    ctx->save_for_backward({addend ? output.sum : x, weight, output.inverse_rms});
    ctx->set_materialize_grads(false);
    return addend ? variable_list{output.y, output.sum} : variable_list{output.y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor grad_sum = grads.size() > 1 ? grads[1] : at::Tensor();
    if (!grads[0].defined()) return {grad_sum, grad_sum, {}, {}, {}};
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const at::Tensor scale = norm_scale(saved[0], weight, ctx->saved_data["zero_centered"].toBool());
    const at::ScalarType dtype = scale.scalar_type();
    const auto [grad_wide, grad_weight] = rms_norm_backward(
        {grads[0].to(dtype), grad_sum.defined() ? std::optional(grad_sum.to(dtype)) : std::nullopt,
         saved[0].to(dtype), scale, saved[2]},
        {true, weight.requires_grad()});
    const at::Tensor grad_x = grad_wide.to(saved[0].scalar_type());
    if (weight.requires_grad()) {
      const at::NoGradGuard no_grad;
      add_gradient(weight, grad_weight);
    }
    return {grad_x, grads.size() > 1 ? grad_x : at::Tensor(), {}, {}, {}};
  }
};

using OptionalTensor = std::optional<at::Tensor>;

/// The weight [V, C] with lora_b [V, rank] as further columns.
at::Tensor joined(const at::Tensor& weight, const OptionalTensor& lora_b) {
  return lora_b ? at::cat({weight, lora_b->to(weight.scalar_type())}, 1) : weight;
}

/// hidden [R, C] with scale hidden a^T [R, rank] as further columns, so that the logits are those of one
/// product.
at::Tensor joined(const at::Tensor& hidden, const LowRank& adapter) {
  if (!adapter.a.defined()) return hidden;
  const at::Tensor inner = accumulating::linear(hidden.to(adapter.a.scalar_type()), Projection{adapter.a});
  return at::cat({hidden, (inner * adapter.scale).to(hidden.scalar_type())}, 1);
}

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// The joined weight is made anew for the backward pass, so that it takes no memory between the passes.
class HeadLogprobs : public Function<HeadLogprobs> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                            const OptionalTensor& lora_b, const at::Tensor& edge_row,
                            const at::Tensor& edge_target) {
    auto [logprobs, lse] = edge_logprobs_forward(hidden, joined(weight, lora_b), edge_row, edge_target);
    ctx->save_for_backward({hidden, weight, lora_b.value_or(at::Tensor()), edge_row, edge_target, lse});
    return logprobs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor lora_b = if_defined(saved[2]);
    const at::Tensor& trained = lora_b.value_or(saved[1]);
    at::Tensor sum;
    if (trained.requires_grad()) sum = sum_or_zeros(trained);
    const at::Tensor grad_hidden = edge_logprobs_backward(grads[0], saved[0], joined(saved[1], lora_b),
                                                          saved[3], saved[4], saved[5], sum);
    return {grad_hidden, {}, {}, {}, {}};
  }
};

class HeadDistribution : public Function<HeadDistribution> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                               const OptionalTensor& lora_b, const at::Tensor& edge_row,
                               const at::Tensor& edge_target, double softcap) {
    const at::ScalarType dtype = sum_dtype(weight);
    ctx->saved_data["softcap"] = softcap;
    ctx->set_materialize_grads(false);  // without entropies, no gradients of theirs are computed
    const auto [logprobs, entropy, lse, mean] =
        detail::call<"edge_distribution", detail::DistributionResults>(detail::DistributionArguments{
            {hidden.to(dtype), joined(weight.to(dtype), lora_b), edge_row, edge_target},
            {.softcap = softcap}});
    ctx->save_for_backward({hidden, weight, lora_b.value_or(at::Tensor()), edge_row, edge_target, lse, mean});
    return {logprobs, entropy};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &hidden = saved[0], &weight = saved[1];
    const OptionalTensor lora_b = if_defined(saved[2]);
    const at::Tensor& trained = lora_b.value_or(weight);
    const at::ScalarType dtype = sum_dtype(weight);
    const auto [grad_hidden, grad_weight, grad_bias] =
        detail::call<"edge_distribution_backward", detail::DistributionGradients>(
            detail::DistributionBackward{
                grads[0],
                grads[1],
                saved[5],
                saved[6],
                {{hidden.to(dtype), joined(weight.to(dtype), lora_b), saved[3], saved[4]},
                 {.softcap = ctx->saved_data["softcap"].toDouble()}},
                {true, trained.requires_grad(), false}});
    if (trained.requires_grad())
      add_gradient(trained, grad_weight.slice(1, grad_weight.size(1) - trained.size(1)));
    return {grad_hidden.to(hidden.scalar_type()), {}, {}, {}, {}, {}};
  }
};

}  // namespace

void add_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
  at::Tensor& sum = sum_of(parameter);
  if (sum.defined()) {
    sum.add_(gradient);
  } else {
    sum = gradient.to(sum_dtype(parameter)).contiguous();
  }
}

at::Tensor linear(const at::Tensor& x, const Projection& projection) {
  return linears(x, {projection}).front();
}

std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<Projection>& projections) {
  RECORD_USER_SCOPE("linear");
  std::vector<at::Tensor> parameters;
  Places places;
  for (const Projection& projection : projections) parameters.push_back(projection.weight);
  for (const Projection& projection : projections) {
    places.bias.push_back(projection.bias.defined() ? static_cast<int64_t>(parameters.size()) : -1);
    if (projection.bias.defined()) parameters.push_back(projection.bias);
    const auto& [lora_a, lora_b, scale] = projection.adapter;
    places.adapter.push_back(lora_a.defined() ? static_cast<int64_t>(parameters.size()) : -1);
    places.scale.push_back(scale);
    if (lora_a.defined()) parameters.insert(parameters.end(), {lora_a, lora_b});
  }
  return Linears::apply(x, at::TensorList(parameters), places);
}

at::Tensor stacked_linear(const at::Tensor& x, const StackedProjections& projections, int64_t index) {
  RECORD_USER_SCOPE("linear");
  return StackedLinear::apply(x, projections.weight, projections.bias, index);
}

at::Tensor unrounded_linear(const at::Tensor& x, const Projection& projection) {
  RECORD_USER_SCOPE("linear");
  const at::Tensor& bias = projection.bias;
  return UnroundedLinear::apply(x, projection.weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& input_ids, int64_t frozen_row) {
  return Embedding::apply(weight, input_ids, frozen_row);
}

at::Tensor unrounded(const at::Tensor& parameter) {
  return Unrounded::apply(parameter);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool zero_centered) {
  return RmsNorm::apply(x, std::optional<at::Tensor>(), weight, eps, zero_centered)[0];
}

NormOfSum add_rms_norm(const at::Tensor& x, const at::Tensor& addend, const at::Tensor& weight, double eps,
                       bool zero_centered) {
  const variable_list outputs = RmsNorm::apply(x, std::optional(addend), weight, eps, zero_centered);
  return {outputs[1], outputs[0]};
}

at::Tensor head_logprobs(const at::Tensor& hidden, const Projection& head, const at::Tensor& edge_row,
                         const at::Tensor& edge_target) {
  return HeadLogprobs::apply(joined(hidden, head.adapter), head.weight, if_defined(head.adapter.b), edge_row,
                             edge_target);
}

EdgeDistribution head_distribution(const at::Tensor& hidden, const Projection& head,
                                   const at::Tensor& edge_row, const at::Tensor& edge_target,
                                   double softcap) {
  const variable_list results = HeadDistribution::apply(
      joined(hidden, head.adapter), head.weight, if_defined(head.adapter.b), edge_row, edge_target, softcap);
  return {results[0], results[1]};
}

HeadFactors head_factors(const at::Tensor& hidden, const Projection& head) {
  const at::NoGradGuard no_grad;
  return {joined(hidden, head.adapter), joined(head.weight, if_defined(head.adapter.b))};
}

const detail::PreparedWeight* prepared(const at::Tensor& weight) {
  auto* kept = PreparedWeights::find();
  if (kept == nullptr) return nullptr;
  return &kept->get(weight, [&] { return detail::PreparedWeight(weight.detach()); });
}

at::Tensor head_logits(const at::Tensor& hidden, const Projection& head) {
  const at::NoGradGuard no_grad;
  const at::Tensor logits = unrounded_affine(hidden, head.weight, {});
  if (const auto& [a, b, scale] = head.adapter; a.defined()) {
    detail::add_product(logits, detail::affine(hidden.to(a.scalar_type()), a, {}).mul_(scale), b.t());
  }
  return logits;
}

}  // namespace espalier::accumulating
