// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/causal_conv1d/causal_conv1d.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "espalier/ops/causal_conv1d/checks.h"
#include "espalier/ops/causal_conv1d/taps.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/dispatch.h"
#include "espalier/ops/indices.h"
#include "espalier/ops/paths.h"

namespace espalier {
namespace {

using detail::find_op;
using detail::if_defined;
using detail::meta_like;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using TailGradients = std::tuple<at::Tensor, at::Tensor>;  // of x and tails

at::Tensor call_forward(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                        const at::Tensor& prev, const OptionalTensor& tails, bool silu) {
  static const auto op = find_op<decltype(call_forward)>("espalier::causal_conv1d");
  return op.call(x, weight, bias, prev, tails, silu);
}

Gradients call_backward(const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
                        const OptionalTensor& bias, const at::Tensor& prev, const OptionalTensor& tails,
                        bool silu) {
  static const auto op = find_op<decltype(call_backward)>("espalier::causal_conv1d_backward");
  return op.call(grad_y, x, weight, bias, prev, tails, silu);
}

at::Tensor call_tails(const at::Tensor& x, const at::Tensor& prev, const OptionalTensor& tails,
                      const at::Tensor& ends, int64_t taps) {
  static const auto op = find_op<decltype(call_tails)>("espalier::causal_conv1d_tails");
  return op.call(x, prev, tails, ends, taps);
}

TailGradients call_tails_backward(const at::Tensor& grad, const at::Tensor& prev, const at::Tensor& ends,
                                  std::optional<c10::SymInt> num_tails) {
  static const auto op = find_op<decltype(call_tails_backward)>("espalier::causal_conv1d_tails_backward");
  return op.call(grad, prev, ends, num_tails);
}

class Convolve : public torch::autograd::Function<Convolve> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, const at::Tensor& prev, const OptionalTensor& tails,
                            bool silu) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, weight, bias.value_or(at::Tensor()), prev, tails.value_or(at::Tensor())});
    ctx->saved_data["silu"] = silu;
    return call_forward(x, weight, bias, prev, tails, silu);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [x, weight, bias, tails] =
        call_backward(grads[0], saved[0], saved[1], if_defined(saved[2]), saved[3], if_defined(saved[4]),
                      ctx->saved_data["silu"].toBool());
    return {x, weight, bias, {}, tails, {}};
  }
};

at::Tensor forward_autograd(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                            const at::Tensor& prev, const OptionalTensor& tails, bool silu) {
  return Convolve::apply(x, weight, bias, prev, tails, silu);
}

at::Tensor forward_meta(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                        const at::Tensor& prev, const OptionalTensor& tails, bool) {
  detail::check_causal_conv1d({x, weight, bias, prev, tails});
  return meta_like(x);
}

Gradients backward_meta(const at::Tensor&, const at::Tensor& x, const at::Tensor& weight,
                        const OptionalTensor& bias, const at::Tensor&, const OptionalTensor& tails, bool) {
  return {meta_like(x), meta_like(weight), bias ? meta_like(*bias) : at::Tensor(),
          tails ? meta_like(*tails) : at::Tensor()};
}

class Tails : public torch::autograd::Function<Tails> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& prev,
                            const OptionalTensor& tails, const at::Tensor& ends, int64_t taps) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({prev, ends});
    if (tails) ctx->saved_data["num_tails"] = tails->sym_size(0);
    return call_tails(x, prev, tails, ends, taps);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto num_tails = ctx->saved_data.find("num_tails");
    auto [x, tails] = call_tails_backward(
        grads[0], saved[0], saved[1],
        num_tails == ctx->saved_data.end() ? std::nullopt : std::optional(num_tails->second.toSymInt()));
    return {x, {}, tails, {}, {}};
  }
};

at::Tensor tails_autograd(const at::Tensor& x, const at::Tensor& prev, const OptionalTensor& tails,
                          const at::Tensor& ends, int64_t taps) {
  return Tails::apply(x, prev, tails, ends, taps);
}

/// The rows (taps.h) of the tails at the ends, checked.
std::vector<int64_t> checked_tail_rows(const at::Tensor& prev, const at::Tensor& ends, int64_t num_tails,
                                       int64_t taps) {
  const char* op = "causal_conv1d_tails";
  TORCH_CHECK(1 <= taps && taps <= kMostConvolutionTaps, op, ": taps must be from 1 to ",
              kMostConvolutionTaps, ", received ", taps);
  return detail::tail_rows(detail::checked_prev(op, prev, prev.size(0), num_tails), num_tails, taps,
                           detail::checked_tokens(op, "ends", ends, prev.size(0)));
}

at::Tensor tails_of(const at::Tensor& x, const at::Tensor& prev, const OptionalTensor& tails,
                    const at::Tensor& ends, int64_t taps) {
  TORCH_CHECK(x.dim() == 2 && prev.dim() == 1 && prev.size(0) == x.size(0),
              "causal_conv1d_tails: expected x [T, C] and prev [T], received ", x.sizes(), " and ",
              prev.sizes());
  const std::vector<int64_t> rows = checked_tail_rows(prev, ends, tails ? tails->size(0) : 0, taps);
  return detail::convolution_rows(x, tails)
      .index_select(0, detail::to_indices(rows, x.device()))
      .view({ends.size(0), taps - 1, x.size(1)});
}

TailGradients tails_backward(const at::Tensor& grad, const at::Tensor& prev, const at::Tensor& ends,
                             std::optional<int64_t> num_tails) {
  TORCH_CHECK(grad.dim() == 3 && prev.dim() == 1 && ends.dim() == 1 && grad.size(0) == ends.size(0),
              "causal_conv1d_tails_backward: expected a gradient [E, W - 1, C], prev [T] and ends [E], "
              "received ",
              grad.sizes(), ", ", prev.sizes(), " and ", ends.sizes());
  const int64_t count = num_tails.value_or(0), history = grad.size(1), first_token = 1 + count * history;
  const std::vector<int64_t> rows = checked_tail_rows(prev, ends, count, history + 1);
  const at::Tensor flat = grad.reshape({-1, grad.size(2)});
  const auto sum_of = [&](int64_t begin, int64_t end) {
    std::vector<int64_t> from, to;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (begin <= rows[i] && rows[i] < end) {
        from.push_back(static_cast<int64_t>(i));
        to.push_back(rows[i] - begin);
      }
    }
    return at::zeros({end - begin, flat.size(1)}, flat.options())
        .index_add_(0, detail::to_indices(to, flat.device()),
                    flat.index_select(0, detail::to_indices(from, flat.device())));
  };
  return {sum_of(first_token, first_token + prev.size(0)),
          num_tails ? sum_of(1, first_token).view({count, history, flat.size(1)}) : at::Tensor()};
}

at::Tensor tails_meta(const at::Tensor& x, const at::Tensor&, const OptionalTensor&, const at::Tensor& ends,
                      int64_t taps) {
  return at::empty_symint({ends.sym_size(0), taps - 1, x.sym_size(1)}, x.options());
}

TailGradients tails_backward_meta(const at::Tensor& grad, const at::Tensor& prev, const at::Tensor&,
                                  std::optional<c10::SymInt> num_tails) {
  return {at::empty_symint({prev.sym_size(0), grad.sym_size(2)}, grad.options()),
          num_tails ? at::empty_symint({*num_tails, grad.sym_size(1), grad.sym_size(2)}, grad.options())
                    : at::Tensor()};
}

}  // namespace

void detail::check_causal_conv1d(const ConvolutionArguments& given) {
  const char* op = "causal_conv1d";
  const auto& [x, weight, bias, prev, tails] = given;
  const auto dtype = x.scalar_type();
  TORCH_CHECK(x.dim() == 2 && (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16), op,
              ": x must be [T, C] float64, float32 or bfloat16, received ", x.sizes(), " ", dtype);
  TORCH_CHECK(weight.dim() == 2 && weight.size(0) == x.size(1) && 1 <= weight.size(1) &&
                  weight.size(1) <= kMostConvolutionTaps,
              op, ": weight must be [C, W] where x is [T, C], W from 1 to ", kMostConvolutionTaps,
              ", received ", weight.sizes(), " and ", x.sizes());
  TORCH_CHECK((weight.scalar_type() == dtype || weight.scalar_type() == accumulator_dtype(dtype)) &&
                  weight.device() == x.device(),
              op, ": weight must be ", dtype, " or ", accumulator_dtype(dtype), " on ", x.device(),
              ", received ", weight.scalar_type(), " on ", weight.device());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == x.size(1) &&
                        bias->scalar_type() == weight.scalar_type() && bias->device() == x.device()),
              op, ": bias must be [C], ", weight.scalar_type(), " as weight, on ", x.device(), ", received ",
              bias->sizes(), " ", bias->scalar_type(), " on ", bias->device());
  TORCH_CHECK(
      !tails || (tails->dim() == 3 && tails->size(1) == weight.size(1) - 1 && tails->size(2) == x.size(1) &&
                 tails->scalar_type() == dtype && tails->device() == x.device()),
      op, ": tails must be [N, W - 1, C], ", dtype, " as x, on ", x.device(), ", received ", tails->sizes(),
      " ", tails->scalar_type(), " on ", tails->device());
}

at::Tensor detail::convolution_rows(const at::Tensor& x, const OptionalTensor& tails) {
  const at::Tensor zero = at::zeros({1, x.size(1)}, x.options());
  if (!tails) return at::cat({zero, x});
  return at::cat({zero, tails->reshape({-1, x.size(1)}), x});
}

at::Tensor causal_conv1d(const CausalConv1d& given) {
  return call_forward(given.x, given.weight, if_defined(given.bias), given.prev, if_defined(given.tails),
                      given.silu);
}

at::Tensor causal_conv1d_tails(const CausalConv1d& given, const at::Tensor& ends) {
  return call_tails(given.x, given.prev, if_defined(given.tails), ends, given.weight.size(1));
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  m.impl("causal_conv1d", &forward_autograd);
  m.impl("causal_conv1d_tails", &tails_autograd);
  // No double backward.
  m.impl("causal_conv1d_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("causal_conv1d_tails_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  m.impl("causal_conv1d_tails", &tails_of);
  m.impl("causal_conv1d_tails_backward", &tails_backward);
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  m.impl("causal_conv1d", &forward_meta);
  m.impl("causal_conv1d_backward", &backward_meta);
  m.impl("causal_conv1d_tails", &tails_meta);
  m.impl("causal_conv1d_tails_backward", &tails_backward_meta);
}

}  // namespace espalier
