// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/causal_conv1d/causal_conv1d.h"

#include "espalier/ops/causal_conv1d/arguments.h"
#include "espalier/ops/causal_conv1d/taps.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/operator.h"
#include "espalier/ops/paths.h"

namespace espalier {
namespace {

using detail::call;
using detail::meta_like;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TailGradients = std::tuple<at::Tensor, at::Tensor>;  // of x and tails

struct Convolve : detail::Definition<"causal_conv1d", CausalConv1d, at::Tensor> {
  static constexpr std::array<size_t, 4> differentiable{0, 1, 2, 4};

  static auto backward(const detail::Recorded<Convolve>& recorded, const variable_list& grads) {
    return call<"causal_conv1d_backward", detail::ConvolutionGradients>(grads[0], recorded.given);
  }
};

at::Tensor convolution_forward_meta(const CausalConv1d& given) {
  detail::check_causal_conv1d(given);
  return meta_like(given.x);
}

detail::ConvolutionGradients convolution_backward_meta(const at::Tensor&, const CausalConv1d& given) {
  return {meta_like(given.x), meta_like(given.weight), meta_like(given.bias), meta_like(given.tails)};
}

/// The arguments of causal_conv1d_tails.
struct TailArguments {
  at::Tensor x, prev;
  TensorOrNone tails;
  at::Tensor ends;
  int64_t taps = 0;

  static auto all(auto& given) { return std::tie(given.x, given.prev, given.tails, given.ends, given.taps); }
};

class Tails : public torch::autograd::Function<Tails> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& prev,
                            const std::optional<at::Tensor>& tails, const at::Tensor& ends, int64_t taps) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({prev, ends});
    if (tails) ctx->saved_data["num_tails"] = tails->sym_size(0);
    return call<"causal_conv1d_tails", at::Tensor>(TailArguments{x, prev, tails, ends, taps});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto found = ctx->saved_data.find("num_tails");
    const auto num_tails =
        found == ctx->saved_data.end() ? std::nullopt : std::optional(found->second.toSymInt());
    auto [x, tails] =
        call<"causal_conv1d_tails_backward", TailGradients>(grads[0], saved[0], saved[1], num_tails);
    return {x, {}, tails, {}, {}};
  }
};

at::Tensor tails_autograd(const TailArguments& given) {
  return Tails::apply(given.x, given.prev, detail::if_defined(given.tails), given.ends, given.taps);
}

/// Validates arguments and returns the rows (taps.h) of the tails at the ends.
std::vector<int64_t> checked_tail_rows(const at::Tensor& prev, const at::Tensor& ends, int64_t num_tails,
                                       int64_t taps) {
  const char* op = "causal_conv1d_tails";
  TORCH_CHECK(1 <= taps && taps <= kMostConvolutionTaps, op, ": taps must be from 1 to ",
              kMostConvolutionTaps, ", received ", taps);
  return detail::tail_rows(detail::checked_prev(op, prev, prev.size(0), num_tails), num_tails, taps,
                           detail::checked_tokens(op, "ends", ends, prev.size(0)));
}

at::Tensor compute_tails(const TailArguments& given) {
  const auto& [x, prev, tails, ends, taps] = given;
  TORCH_CHECK(x.dim() == 2 && prev.dim() == 1 && prev.size(0) == x.size(0),
              "causal_conv1d_tails: expected x [T, C] and prev [T], received ", x.sizes(), " and ",
              prev.sizes());
  const std::vector<int64_t> rows = checked_tail_rows(prev, ends, tails.defined() ? tails.size(0) : 0, taps);
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
  const auto sum_rows = [&](int64_t begin, int64_t end) {
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
  return {sum_rows(first_token, first_token + prev.size(0)),
          num_tails ? sum_rows(1, first_token).view({count, history, flat.size(1)}) : at::Tensor()};
}

at::Tensor tails_meta(const TailArguments& given) {
  return at::empty_symint({given.ends.sym_size(0), given.taps - 1, given.x.sym_size(1)}, given.x.options());
}

TailGradients tails_backward_meta(const at::Tensor& grad, const at::Tensor& prev, const at::Tensor&,
                                  std::optional<c10::SymInt> num_tails) {
  return {at::empty_symint({prev.sym_size(0), grad.sym_size(2)}, grad.options()),
          num_tails ? at::empty_symint({*num_tails, grad.sym_size(1), grad.sym_size(2)}, grad.options())
                    : at::Tensor()};
}

}  // namespace

void detail::check_causal_conv1d(const CausalConv1d& given) {
  const char* op = "causal_conv1d";
  const auto& [x, weight, bias, prev, tails, silu] = given;
  const auto dtype = x.scalar_type();
  check_float(op, "x", x);
  check_rank(op, "x", x, 2);
  TORCH_CHECK(weight.dim() == 2 && weight.size(0) == x.size(1) && 1 <= weight.size(1) &&
                  weight.size(1) <= kMostConvolutionTaps,
              op, ": weight must be [C, W] where x is [T, C], W from 1 to ", kMostConvolutionTaps,
              ", received ", weight.sizes(), " and ", x.sizes());
  TORCH_CHECK((weight.scalar_type() == dtype || weight.scalar_type() == accumulator_dtype(dtype)) &&
                  weight.device() == x.device(),
              op, ": weight must be ", dtype, " or ", accumulator_dtype(dtype), " on ", x.device(),
              ", received ", weight.scalar_type(), " on ", weight.device());
  check_if_defined(op, "bias", bias, {"[C]", {x.size(1)}, weight.options()});
  const c10::SymInt count = tails.defined() ? tails.sym_size(0) : 0;
  check_if_defined(op, "tails", tails,
                   {"[N, W - 1, C]", {count, weight.size(1) - 1, x.size(1)}, x.options()});
}

at::Tensor detail::convolution_rows(const at::Tensor& x, const at::Tensor& tails) {
  const at::Tensor zero = at::zeros({1, x.size(1)}, x.options());
  if (!tails.defined()) return at::cat({zero, x});
  return at::cat({zero, tails.reshape({-1, x.size(1)}), x});
}

at::Tensor causal_conv1d(const CausalConv1d& given) {
  return Convolve::forward(given);
}

at::Tensor causal_conv1d_tails(const CausalConv1d& given, const at::Tensor& ends) {
  return call<"causal_conv1d_tails", at::Tensor>(
      TailArguments{given.x, given.prev, given.tails, ends, given.weight.size(1)});
}

TORCH_LIBRARY_IMPL(espalier, Autograd, m) {
  detail::Differentiated<Convolve>::define(m);
  m.impl("causal_conv1d_tails", detail::kKernel<&tails_autograd>);
  m.impl("causal_conv1d_tails_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  detail::implement<&compute_tails, &tails_backward>(m, "causal_conv1d_tails");
}

TORCH_LIBRARY_IMPL(espalier, Meta, m) {
  detail::implement<&convolution_forward_meta, &convolution_backward_meta>(m, "causal_conv1d");
  detail::implement<&tails_meta, &tails_backward_meta>(m, "causal_conv1d_tails");
}

}  // namespace espalier
