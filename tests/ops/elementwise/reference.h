// SPDX-License-Identifier: Apache-2.0
// RMSNorm, rotary positions and SwiGLU, from ATen operators; autograd differentiates it.
#pragma once

#include <ATen/ATen.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise/elementwise.h"

namespace espalier::reference {

inline at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor upcast_x = x.to(detail::accumulator_dtype(x.scalar_type()));
  const at::Tensor inverse_rms = at::rsqrt(upcast_x.square().mean({-1}, /*keepdim=*/true).add(eps));
  return (upcast_x * inverse_rms).to(x.scalar_type()) * weight;
}

inline at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::vector<at::Tensor> halves = x.to(cos.scalar_type()).chunk(2, -1);
  const at::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
  return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1).to(x.scalar_type());
}

inline at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

}  // namespace espalier::reference
