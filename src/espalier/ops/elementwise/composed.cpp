// SPDX-License-Identifier: Apache-2.0
// Formulas: docs/math.md, "Elementwise parts".
#include "espalier/ops/elementwise/composed.h"

#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise/arguments.h"
#include "espalier/ops/operator.h"

namespace espalier::composed {
namespace {

at::Tensor upcast(const at::Tensor& tensor) {
  return tensor.to(detail::accumulator_dtype(tensor.scalar_type()));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const TensorOrNone& addend,
                                                        const at::Tensor& weight, double eps) {
  detail::check_rms_norm(x, addend, weight);
  const at::Tensor sum = addend.defined() ? x.add(addend) : at::Tensor();
  const at::Tensor upcast_x = upcast(sum.defined() ? sum : x);
  const at::Tensor inverse_rms = upcast_x.square().mean({-1}).add(eps).rsqrt();
  const at::Tensor y = upcast_x.mul(inverse_rms.unsqueeze(-1)).to(x.scalar_type()).mul(weight);
  return {y, sum, inverse_rms};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_y, const TensorOrNone& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& inverse_rms,
                                                     std::array<bool, 2> output_mask) {
  detail::check_rms_norm(x, grad_y, weight);
  detail::check_rms_norm(x, grad_sum, weight);
  const at::Tensor inverse = inverse_rms.unsqueeze(-1), normalised = upcast(x).mul(inverse);
  const at::Tensor grad = upcast(grad_y);
  at::Tensor grad_x, grad_weight;
  if (output_mask[1]) {
    grad_weight = grad.mul(normalised)
                      .reshape({-1, weight.size(0)})
                      .sum({0}, /*keepdim=*/false, at::kDouble)
                      .to(grad.scalar_type());
  }
  if (output_mask[0]) {
    const at::Tensor inner = grad.mul(upcast(weight));
    const at::Tensor mean = inner.mul(normalised).mean({-1}, /*keepdim=*/true);
    grad_x = inner.sub(normalised.mul(mean)).mul(inverse);
    if (grad_sum.defined()) grad_x = grad_x.add(upcast(grad_sum));
    grad_x = grad_x.to(x.scalar_type());
  }
  return {grad_x, grad_weight};
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  detail::check_rotary(x, cos, sin);
  const std::vector<at::Tensor> halves = upcast(x).chunk(2, -1);
  const at::Tensor c = cos.unsqueeze(1), s = back ? sin.neg().unsqueeze(1) : sin.unsqueeze(1);
  return at::cat({halves[0].mul(c).sub(halves[1].mul(s)), halves[1].mul(c).add(halves[0].mul(s))}, -1)
      .to(x.scalar_type());
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  detail::check_swiglu(gate, up);
  return at::silu(upcast(gate)).mul(upcast(up)).to(gate.scalar_type());
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  detail::check_swiglu(gate, up);
  detail::check_swiglu(gate, grad);
  const at::Tensor g = upcast(gate), d = upcast(grad);
  const at::Tensor slope = g.sigmoid().mul(g.mul(g.neg().sigmoid()).add(1));
  return {d.mul(upcast(up)).mul(slope).to(gate.scalar_type()), d.mul(at::silu(g)).to(up.scalar_type())};
}

#ifndef ESPALIER_CUDA_KERNELS
TORCH_LIBRARY_IMPL(espalier, CUDA, m) {
  m.impl("rms_norm", detail::kKernel<&rms_norm>);
  m.impl("rms_norm_backward", detail::kKernel<&rms_norm_backward>);
  m.impl("rotary", &rotary);
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
}
#endif

}  // namespace espalier::composed
