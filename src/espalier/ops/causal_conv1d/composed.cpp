// SPDX-License-Identifier: Apache-2.0
// The convolution composed of ATen operators, for any device. Formulas: docs/math.md, "Causal convolution on
// trees".
#include <ATen/ATen.h>

#include "espalier/ops/causal_conv1d/arguments.h"
#include "espalier/ops/causal_conv1d/taps.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise/activations.h"
#include "espalier/ops/operator.h"
#include "espalier/ops/paths.h"

namespace espalier {
namespace {

using detail::ConvolutionGradients;

/// One call: the list of rows that it reads, and its arguments in the accumulator dtype.
class Convolution {
 public:
  explicit Convolution(const CausalConv1d& given)
      : dtype_(detail::accumulator_dtype(given.x.scalar_type())),
        taps_(given.weight.size(1)),
        weight_(given.weight.to(dtype_)),
        bias_(given.bias.defined() ? given.bias.to(dtype_) : at::Tensor()) {
    const int64_t num_tails = given.tails.defined() ? given.tails.size(0) : 0;
    const auto prev = detail::checked_prev("causal_conv1d", given.prev, given.x.size(0), num_tails);
    list_ = detail::convolution_list(prev, num_tails, taps_);
    const at::Device device = given.x.device();
    own_ = detail::to_indices(list_.own, device);
    rows_ = detail::convolution_rows(given.x, given.tails)
                .index_select(0, detail::to_indices(list_.row, device))
                .to(dtype_);
  }

  at::Tensor sums() const {
    const int64_t size = rows_.size(0) - (taps_ - 1);
    at::Tensor sum = bias_.defined() ? bias_.expand({size, -1}).clone() : at::Tensor();
    for (int64_t tap = 0; tap < taps_; ++tap) {
      const at::Tensor rows = rows_.narrow(0, tap, size), weight = weight_.select(1, tap);
      sum = sum.defined() ? sum.addcmul_(rows, weight) : rows * weight;
    }
    return sum.index_select(0, own_ - (taps_ - 1));
  }

  /// Gradients of x, tails, weight and bias, from those of the sums [T, C].
  ConvolutionGradients gradients(const at::Tensor& grad_sums, const CausalConv1d& given) const {
    const int64_t size = rows_.size(0) - (taps_ - 1);
    const at::Tensor grad = at::zeros({size, rows_.size(1)}, rows_.options());
    grad.index_copy_(0, own_ - (taps_ - 1), grad_sums);
    at::Tensor grad_rows = at::zeros_like(rows_), grad_weight = at::empty_like(weight_);
    for (int64_t tap = 0; tap < taps_; ++tap) {
      grad_rows.narrow(0, tap, size).addcmul_(grad, weight_.select(1, tap));
      grad_weight.select(1, tap).copy_((grad * rows_.narrow(0, tap, size)).sum({0}));
    }
    const auto [grad_x, grad_tails] = row_gradients(grad_rows, given);
    const at::Tensor& bias = given.bias;
    return {grad_x, grad_weight.to(given.weight.scalar_type()),
            bias.defined() ? grad_sums.sum({0}).to(bias.scalar_type()) : at::Tensor(), grad_tails};
  }

 private:
  // History rows in the list are duplicates of tokens and tails, so their gradients are added.
  std::pair<at::Tensor, at::Tensor> row_gradients(const at::Tensor& grad_list,
                                                  const CausalConv1d& given) const {
    const int64_t num_rows = given.x.size(0), channels = given.x.size(1);
    const int64_t before_tokens = 1 + (given.tails.defined() ? given.tails.size(0) * (taps_ - 1) : 0);
    // Tokens come first, so that their gradient is a view of the start of the buffer.
    const at::Tensor grad_rows = at::zeros({num_rows + before_tokens, channels}, grad_list.options());
    grad_rows.narrow(0, 0, num_rows).copy_(grad_list.index_select(0, own_));
    if (!list_.history_row.empty()) {
      const at::Device device = grad_list.device();
      std::vector<int64_t> history = list_.history_row;
      for (int64_t& row : history) row += row < before_tokens ? num_rows : -before_tokens;
      grad_rows.index_add_(0, detail::to_indices(history, device),
                           grad_list.index_select(0, detail::to_indices(list_.history_place, device)));
    }
    const auto dtype = given.x.scalar_type();
    const at::Tensor grad_x = grad_rows.narrow(0, 0, num_rows).to(dtype);
    if (!given.tails.defined()) return {grad_x, at::Tensor()};
    const at::Tensor grad_tails = grad_rows.narrow(0, num_rows + 1, before_tokens - 1);
    return {grad_x, grad_tails.reshape(given.tails.sizes()).to(dtype, /*non_blocking=*/false, /*copy=*/true)};
  }

  at::ScalarType dtype_;
  int64_t taps_;
  at::Tensor weight_, bias_;
  detail::ConvolutionList list_;
  at::Tensor own_;   // [T]
  at::Tensor rows_;  // [B, C]
};

at::Tensor forward(const CausalConv1d& given) {
  detail::check_causal_conv1d(given);
  const at::Tensor sums = Convolution(given).sums();
  return (given.silu ? sums * detail::sigmoids(sums).first : sums).to(given.x.scalar_type());
}

ConvolutionGradients backward(const at::Tensor& grad_y, const CausalConv1d& given) {
  detail::check_causal_conv1d(given);
  const Convolution convolution(given);
  at::Tensor grad = grad_y.to(detail::accumulator_dtype(given.x.scalar_type()));
  if (given.silu) {
    const at::Tensor sums = convolution.sums();
    const auto [rising, falling] = detail::sigmoids(sums);
    grad = grad * (rising + sums * rising * falling);
  }
  return convolution.gradients(grad, given);
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  detail::implement<&forward, &backward>(m, "causal_conv1d");
}

}  // namespace espalier
