// SPDX-License-Identifier: Apache-2.0
// Causal convolution along the paths of a forest.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "espalier/ops/argument.h"

namespace espalier {

inline constexpr int64_t kMostConvolutionTaps = 8;

/// What causal_conv1d is given.
struct CausalConv1d {
  at::Tensor x;             // [T, C] float64, float32 or bfloat16
  at::Tensor weight;        // [C, W], W <= 8, of the dtype of x or of sums (float32; float64 for float64)
  TensorOrNone bias = {};   // [C] as weight
  at::Tensor prev;          // [T] int32 on the CPU: paths.h; its contexts are those of `tails`
  TensorOrNone tails = {};  // [N, W - 1, C] as x: what precedes a path that goes on, oldest first
  bool silu = false;        // x / (1 + exp(-x)) of each sum

  static auto all(auto& given) {
    return std::tie(given.x, given.weight, given.bias, given.prev, given.tails, given.silu);
  }
};

/// A convolution per channel in which a token reads itself and the W - 1 tokens before it on its path, zeros
/// before the beginning (the short convolution of Gated DeltaNet and Mamba; Dauphin et al., "Language
/// modeling with gated convolutional networks", 2017, for the causal form):
///   y[t] = act(bias + sum over j < W of weight[:, W - 1 - j] x[prev^j(t)]).
/// Differentiable in x, weight, bias and tails; [T, C] of the dtype of x. Computed in the dtype of sums and
/// rounded once. Backward keeps the inputs alone. Deterministic (on CUDA where ATen is asked to be).
/// Registered as torch.ops.espalier.causal_conv1d(x, weight, bias, prev, tails, silu). Throws on mismatched
/// shapes, dtypes or devices, and where prev is not as said.
at::Tensor causal_conv1d(const CausalConv1d& given);

/// The tails [E, W - 1, C] for paths that go on after the tokens `ends` [E] int64 on the CPU: each the W - 1
/// rows of x up to that token, through `given.tails` where the path inside the list is shorter, zeros before
/// its beginning. Reads weight for its W alone. Differentiable in x and tails. Registered as
/// torch.ops.espalier.causal_conv1d_tails(x, prev, tails, ends, taps).
at::Tensor causal_conv1d_tails(const CausalConv1d& given, const at::Tensor& ends);

/// Plain forms, composed of ATen's operators and differentiated by autograd, which tests compare with.
namespace reference {

/// Token by token.
at::Tensor causal_conv1d(const CausalConv1d& given);
at::Tensor causal_conv1d_tails(const CausalConv1d& given, const at::Tensor& ends);

}  // namespace reference

}  // namespace espalier
