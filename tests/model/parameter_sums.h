// Sums of gradients that their parameters' dtype does not hold.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "espalier/model/parameter_ops.h"
#include "espalier/ops/matrix_product.h"

namespace espalier::testing {

/// 257 rows of ones give weight and bias gradients of 257, which bfloat16 rounds to 256, and a second pass
/// 514: exactly so in the sums. Not in those of weights on a CPU with AMX (ops/matrix_product.h).
inline void expect_unrounded_sums(at::Device device) {
  constexpr int64_t kRows = 257, kIn = 8, kOut = 16;
  const auto options = at::TensorOptions(device).dtype(at::kBFloat16);
  const at::Tensor weight = at::ones({kOut, kIn}, options).requires_grad_();
  const at::Tensor bias = at::ones({kOut}, options).requires_grad_();
  for (int pass = 1; pass <= 2; ++pass) {
    const at::Tensor x = at::ones({kRows, kIn}, options).requires_grad_();
    const at::Tensor out = summing::linear(x, {weight, bias});
    torch::autograd::backward({out}, {at::ones_like(out)});
    for (const at::Tensor& parameter : {weight, bias}) {
      const bool rounds = device.is_cpu() && detail::product_dtype(parameter) == at::kBFloat16;
      if (rounds && parameter.dim() == 2) continue;
      const at::Tensor expected = at::full(parameter.sizes(), static_cast<double>(kRows * pass), at::kFloat);
      EXPECT_TRUE(parameter.grad().cpu().equal(expected)) << parameter.sizes() << ", pass " << pass;
    }
    EXPECT_TRUE(x.grad().cpu().equal(at::full({kRows, kIn}, static_cast<double>(kOut), at::kBFloat16)));
  }
}

}  // namespace espalier::testing
