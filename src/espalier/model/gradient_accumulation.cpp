// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/gradient_accumulation.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <optional>

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

/// x weight^T + bias in the dtype of sums.
at::Tensor unrounded_affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const detail::PreparedWeight* ready = prepared(weight);
  at::Tensor output =
      ready != nullptr ? ready->unrounded(x) : detail::unrounded_product(x, operand_of(weight).t());
  if (bias.defined()) output.add_(bias);
  return output;
}

/// The adapters of a projection of x: its own, for all rows, and those of RowAdapters.
std::vector<AdaptedRows> adapters_of(const Projection& projection, int64_t num_rows) {
  std::vector<AdaptedRows> found;
  if (const RowAdapters* rows = RowAdapterScope::find()) found = rows->of(projection.weight, num_rows);
  if (projection.adapter.a.defined()) found.push_back({0, num_rows, projection.adapter});
  return found;
}

/// Adds scale (x a^T) b^T to the output of these rows of x. Returns scale (x a^T).
at::Tensor add_adapter(const at::Tensor& output, const at::Tensor& x, const AdaptedRows& rows) {
  const auto& [a, b, scale] = rows.adapter;
  const at::Tensor own = x.narrow(0, rows.begin, rows.count).to(a.scalar_type());
  at::Tensor inner = detail::affine(own, a, {}).mul_(scale);
  detail::add_product(output.narrow(0, rows.begin, rows.count), inner, b.t());
  return inner;
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
  std::vector<int64_t> bias;      // of each projection, or -1
  std::vector<int64_t> adapters;  // of each: projection (ascending), a, which b follows, begin, count
  std::vector<double> scale;      // of adapters

  void save(AutogradContext* ctx) const {
    ctx->saved_data["bias"] = bias;
    ctx->saved_data["adapters"] = adapters;
    ctx->saved_data["scale"] = scale;
  }
  static Places saved(AutogradContext* ctx) {
    return {ctx->saved_data["bias"].toIntVector(), ctx->saved_data["adapters"].toIntVector(),
            ctx->saved_data["scale"].toDoubleVector()};
  }
  void add(size_t projection, const AdaptedRows& rows, std::vector<at::Tensor>* tensors) {
    adapters.insert(adapters.end(),
                    {static_cast<int64_t>(projection), std::ssize(*tensors), rows.begin, rows.count});
    scale.push_back(rows.adapter.scale);
    tensors->insert(tensors->end(), {rows.adapter.a, rows.adapter.b});
  }
  /// Whether adapter k is one of the projection.
  bool is_of(size_t k, size_t projection) const {
    return k < scale.size() && adapters[4 * k] == static_cast<int64_t>(projection);
  }
  AdaptedRows rows(size_t k, at::TensorList tensors) const {
    const int64_t *place = &adapters[4 * k], a = place[1];
    return {place[2], place[3], {tensors[a], tensors[a + 1], scale[k]}};
  }
};

class Linears : public Function<Linears> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::TensorList& parameters,
                               const Places& places) {
    const size_t count = places.bias.size(), adapters = places.scale.size();
    const at::Tensor operand = x.to(detail::product_dtype(x));
    variable_list outputs, inner(adapters);
    for (size_t i = 0, k = 0; i < count; ++i) {
      const at::Tensor bias = places.bias[i] < 0 ? at::Tensor() : parameters[places.bias[i]];
      const at::Tensor output = places.is_of(k, i) ? unrounded_affine(operand, parameters[i], bias)
                                                   : affine(operand, parameters[i], bias);
      for (; places.is_of(k, i); ++k) inner[k] = add_adapter(output, x, places.rows(k, parameters));
      outputs.push_back(output.to(x.scalar_type()));
    }
    const auto is_trained = [](const at::Tensor& parameter) { return parameter.requires_grad(); };
    const bool needs_x =
        adapters > 0 || std::any_of(parameters.begin(), parameters.begin() + count, is_trained);
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
    const size_t adapters = places.scale.size();
    const at::TensorList parameters = at::TensorList(saved).slice(1 + adapters);
    const at::ScalarType dtype = grads.front().scalar_type(),
                         product_dtype = detail::product_dtype(grads.front());
    const at::Tensor operand = x.defined() ? x.to(product_dtype) : x;
    at::Tensor grad_x;
    for (size_t i = 0, k = 0; i < grads.size(); ++i) {
      const at::Tensor& weight = parameters[i];
      const at::Tensor bias = places.bias[i] < 0 ? at::Tensor() : parameters[places.bias[i]];
      const at::Tensor grad = grads[i].to(product_dtype);
      if (weight.requires_grad()) add_product(weight, grad.t(), operand);
      if (bias.defined() && bias.requires_grad()) {
        add_gradient(bias, grad.sum({0}, /*keepdim=*/false, sum_dtype(bias)));
      }
      if (ctx->needs_input_grad(0)) {
        if (grads.size() == 1 && adapters == 0) {
          grad_x = detail::affine(grad, operand_of(weight).t(), {});  // nothing to add: rounded at once
        } else if (grad_x.defined()) {
          detail::add_product(grad_x, grad, operand_of(weight));
        } else {
          grad_x = detail::unrounded_product(grad, operand_of(weight));
        }
      }
      for (; places.is_of(k, i); ++k) {
        add_gradients_of(places.rows(k, parameters), grads[i], x, saved[1 + k], grad_x);
      }
    }
    variable_list all(1 + parameters.size() + 1);
    if (grad_x.defined()) all[0] = grad_x.to(dtype);
    return all;
  }

 private:
  /// Those of an adapter, and what it adds to that of x, which may be undefined. `inner`: of add_adapter.
  static void add_gradients_of(const AdaptedRows& rows, const at::Tensor& grad_output, const at::Tensor& x,
                               const at::Tensor& inner, const at::Tensor& grad_x) {
    const auto& [a, b, scale] = rows.adapter;
    const auto own = [&](const at::Tensor& whole) { return whole.narrow(0, rows.begin, rows.count); };
    const at::Tensor grad = own(grad_output).to(b.scalar_type());
    const at::Tensor grad_inner = detail::affine(grad, b.t(), {}).mul_(scale);
    if (b.requires_grad()) add_product(b, grad.t(), inner);
    if (a.requires_grad()) add_product(a, grad_inner.t(), own(x).to(a.scalar_type()));
    if (grad_x.defined()) detail::add_product(own(grad_x), grad_inner, a);
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

/// Matrices [V, rank] of adapters beside each other, in the dtype of sums. Their gradients are summed in
/// place.
class JoinedColumns : public Function<JoinedColumns> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::TensorList& columns) {
    ctx->save_for_backward(columns.vec());
    return at::cat(columns, 1).to(sum_dtype(columns[0]));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    int64_t begin = 0;
    for (const at::Tensor& columns : saved) {
      if (columns.requires_grad()) add_gradient(columns, grads[0].narrow(1, begin, columns.size(1)));
      begin += columns.size(1);
    }
    return variable_list(saved.size());
  }
};

/// The matrices b [V, rank] of the head's adapters beside each other.
OptionalTensor joined_b(const std::vector<AdaptedRows>& adapters) {
  if (adapters.empty()) return std::nullopt;
  std::vector<at::Tensor> all;
  for (const AdaptedRows& rows : adapters) all.push_back(rows.adapter.b);
  return JoinedColumns::apply(at::TensorList(all));
}

/// The weight [V, C] with lora_b [V, rank] as further columns.
at::Tensor joined(const at::Tensor& weight, const OptionalTensor& lora_b) {
  return lora_b ? at::cat({weight, lora_b->to(weight.scalar_type())}, 1) : weight;
}

/// hidden [R, C] with scale hidden a^T [R, rank] of each adapter as further columns, zeros in the rows of
/// others, so that the logits are those of one product.
at::Tensor joined(const at::Tensor& hidden, const std::vector<AdaptedRows>& adapters) {
  if (adapters.empty()) return hidden;
  std::vector<at::Tensor> columns{hidden};
  for (const auto& [begin, count, adapter] : adapters) {
    const at::Tensor own = hidden.narrow(0, begin, count).to(adapter.a.scalar_type());
    const at::Tensor inner = accumulating::linear(own, Projection{adapter.a}) * adapter.scale;
    columns.push_back(
        at::constant_pad_nd(inner.to(hidden.scalar_type()), {0, 0, begin, hidden.size(0) - begin - count}));
  }
  return at::cat(columns, 1);
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
    at::Tensor sum;
    if (lora_b) {
      if (lora_b->requires_grad()) sum = at::zeros_like(*lora_b);
    } else if (saved[1].requires_grad()) {
      sum = sum_or_zeros(saved[1]);
    }
    const at::Tensor grad_hidden = edge_logprobs_backward(grads[0], saved[0], joined(saved[1], lora_b),
                                                          saved[3], saved[4], saved[5], sum);
    return {grad_hidden, {}, lora_b ? sum : at::Tensor(), {}, {}};
  }
};

class HeadDistribution : public Function<HeadDistribution> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                               const OptionalTensor& lora_b, const at::Tensor& edge_row,
                               const at::Tensor& edge_target, const OptionalTensor& temperature,
                               double softcap) {
    const at::ScalarType dtype = sum_dtype(weight);
    ctx->saved_data["softcap"] = softcap;
    ctx->set_materialize_grads(false);  // without entropies, no gradients of theirs are computed
    const auto [logprobs, entropy, lse, mean] =
        detail::call<"edge_distribution", detail::DistributionResults>(detail::DistributionArguments{
            {hidden.to(dtype), joined(weight.to(dtype), lora_b), edge_row, edge_target},
            {.edge_temperature = temperature.value_or(at::Tensor()), .softcap = softcap}});
    ctx->save_for_backward({hidden, weight, lora_b.value_or(at::Tensor()), edge_row, edge_target, lse, mean,
                            temperature.value_or(at::Tensor())});
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
                 {.edge_temperature = saved[7], .softcap = ctx->saved_data["softcap"].toDouble()}},
                {true, trained.requires_grad(), false}});
    at::Tensor grad_b;
    if (lora_b && lora_b->requires_grad()) grad_b = grad_weight.slice(1, weight.size(1));
    if (!lora_b && weight.requires_grad()) add_gradient(weight, grad_weight);
    return {grad_hidden.to(hidden.scalar_type()), {}, grad_b, {}, {}, {}, {}};
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
  for (size_t i = 0; i < projections.size(); ++i) {
    const Projection& projection = projections[i];
    places.bias.push_back(projection.bias.defined() ? std::ssize(parameters) : -1);
    if (projection.bias.defined()) parameters.push_back(projection.bias);
    for (const AdaptedRows& rows : adapters_of(projection, x.size(0))) {
      places.add(i, rows, &parameters);
    }
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
  const std::vector<AdaptedRows> adapters = adapters_of(head, hidden.size(0));
  return HeadLogprobs::apply(joined(hidden, adapters), head.weight, joined_b(adapters), edge_row,
                             edge_target);
}

EdgeDistribution head_distribution(const at::Tensor& hidden, const Projection& head,
                                   const at::Tensor& edge_row, const at::Tensor& edge_target,
                                   const LogitTransform& transform) {
  const std::vector<AdaptedRows> adapters = adapters_of(head, hidden.size(0));
  OptionalTensor temperature = if_defined(transform.edge_temperature);
  if (temperature) temperature = temperature->to(sum_dtype(head.weight));
  const variable_list results =
      HeadDistribution::apply(joined(hidden, adapters), head.weight, joined_b(adapters), edge_row,
                              edge_target, temperature, transform.softcap);
  return {results[0], results[1]};
}

HeadFactors head_factors(const at::Tensor& hidden, const Projection& head) {
  const at::NoGradGuard no_grad;
  const std::vector<AdaptedRows> adapters = adapters_of(head, hidden.size(0));
  return {joined(hidden, adapters), joined(head.weight, joined_b(adapters))};
}

const detail::PreparedWeight* prepared(const at::Tensor& weight) {
  auto* kept = PreparedWeights::find();
  if (kept == nullptr) return nullptr;
  return &kept->get(weight, [&] { return detail::PreparedWeight(weight.detach()); });
}

at::Tensor head_logits(const at::Tensor& hidden, const Projection& head) {
  const at::NoGradGuard no_grad;
  const at::Tensor logits = unrounded_affine(hidden, head.weight, {});
  for (const AdaptedRows& rows : adapters_of(head, hidden.size(0))) add_adapter(logits, hidden, rows);
  return logits;
}

}  // namespace espalier::accumulating
