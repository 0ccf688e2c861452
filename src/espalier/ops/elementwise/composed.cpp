// SPDX-License-Identifier: Apache-2.0
// Formulas: docs/math.md, "Elementwise parts". Products of tensors of two dtypes are computed in the wider
// one and rounded when written, so few passes read or write float32.
#include "espalier/ops/elementwise/composed.h"

#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise/arguments.h"
#include "espalier/ops/operator.h"

namespace espalier::composed {
namespace {

at::Tensor contiguous_like(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const TensorOrNone& addend,
                                                        const at::Tensor& weight, double eps) {
  detail::check_rms_norm(x, addend, weight);
  at::Tensor sum, y = contiguous_like(x);
  if (addend.defined()) {
    sum = contiguous_like(x);
    at::add_out(sum, x, addend);
  }
  const at::Tensor& normed = sum.defined() ? sum : x;
  const at::Tensor inverse_rms =
      at::linalg_vector_norm(normed, 2, {-1}, /*keepdim=*/false, detail::accumulator_dtype(x.scalar_type()))
          .square_()
          .div_(x.size(-1))
          .add_(eps)
          .rsqrt_();
  at::mul_out(y, normed, inverse_rms.unsqueeze(-1));
  return {y.mul_(weight), sum, inverse_rms};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_y, const TensorOrNone& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& inverse_rms,
                                                     std::array<bool, 2> output_mask) {
  detail::check_rms_norm(x, grad_y, weight);
  detail::check_rms_norm(x, grad_sum, weight);
  const at::Tensor inverse = inverse_rms.unsqueeze(-1), normalised = x.mul(inverse);
  const at::Tensor products = normalised.mul(grad_y);
  at::Tensor grad_x, grad_weight;
  if (output_mask[1]) {
    grad_weight = products.reshape({-1, weight.size(0)})
                      .sum({0}, /*keepdim=*/false, at::kDouble)
                      .to(inverse_rms.scalar_type());
  }
  if (output_mask[0]) {
    const at::Tensor upcast_weight = weight.to(inverse_rms.scalar_type());
    const at::Tensor mean = products.matmul(upcast_weight).div_(x.size(-1)).unsqueeze(-1);
    const at::Tensor scaled = grad_y.mul(upcast_weight).mul_(inverse);
    if (grad_sum.defined()) scaled.add_(grad_sum);
    grad_x = contiguous_like(x);
    at::addcmul_out(grad_x, scaled, normalised, mean.mul_(inverse), -1);
  }
  return {grad_x, grad_weight};
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  detail::check_rotary(x, cos, sin);
  const at::Tensor out = contiguous_like(x), c = cos.unsqueeze(1), s = sin.unsqueeze(1);
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  std::vector<at::Tensor> rotated = out.chunk(2, -1);
  const double sign = back ? -1 : 1;
  at::addcmul_out(rotated[0], halves[0].mul(c), halves[1], s, -sign);
  at::addcmul_out(rotated[1], halves[1].mul(c), halves[0], s, sign);
  return out;
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  detail::check_swiglu(gate, up);
  at::Tensor out = contiguous_like(gate);
  return at::silu_out(out, gate).mul_(up);
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  detail::check_swiglu(gate, up);
  detail::check_swiglu(gate, grad);
  at::Tensor grad_gate = contiguous_like(gate), grad_up = contiguous_like(up);
  at::silu_backward_out(grad_gate, grad.mul(up), gate);
  at::mul_out(grad_up, at::silu(gate), grad);
  return {grad_gate, grad_up};
}

TORCH_LIBRARY_IMPL(espalier, CUDA, m) {
  detail::implement<&rms_norm, &rms_norm_backward>(m, "rms_norm");
  m.impl("rotary", &rotary);
  detail::implement<&swiglu, &swiglu_backward>(m, "swiglu");
}

}  // namespace espalier::composed
