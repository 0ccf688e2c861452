// SPDX-License-Identifier: Apache-2.0
// Causal convolution along the paths of a forest.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "espalier/ops/argument.h"

namespace espalier {

inline constexpr int64_t kMostConvolutionTaps = 8;

/// The arguments of causal_conv1d.
struct CausalConv1d {
  at::Tensor x;             // [T, C] float64, float32 or bfloat16
  at::Tensor weight;        // [C, W], W <= 8, in the dtype of x or the accumulator dtype
  TensorOrNone bias = {};   // [C] as weight
  at::Tensor prev;          // [T] int32 on the CPU: paths.h; contexts index `tails`
  TensorOrNone tails = {};  // [N, W - 1, C] as x: rows before a path that continues a context, oldest first
  bool silu = false;        // x / (1 + exp(-x)) of each sum

  static auto all(auto& given) {
    return std::tie(given.x, given.weight, given.bias, given.prev, given.tails, given.silu);
  }
};

/// A depthwise convolution over a token and the W - 1 tokens before it on its path, zero-padded at the start
/// (the short convolution of Gated DeltaNet and Mamba; Dauphin et al., "Language modeling with gated
/// convolutional networks", 2017, for the causal form):
///   y[t] = act(bias + sum over j < W of weight[:, W - 1 - j] x[prev^j(t)]).
/// Differentiable in x, weight, bias and tails; [T, C] of the dtype of x. Computed in the accumulator dtype
/// and rounded once. Backward saves only the inputs. Deterministic (on CUDA if deterministic algorithms are
/// enabled). Registered as torch.ops.espalier.causal_conv1d(x, weight, bias, prev, tails, silu). Throws on
/// mismatched shapes, dtypes or devices, and on invalid prev.
at::Tensor causal_conv1d(const CausalConv1d& given);

/// The tails [E, W - 1, C] for paths that continue after the tokens `ends` [E] int64 on the CPU: the W - 1
/// rows of x up to that token, continued into `given.tails` if the path is shorter, zero-padded at its start.
/// Uses weight only for W. Differentiable in x and tails. Registered as
/// torch.ops.espalier.causal_conv1d_tails(x, prev, tails, ends, taps).
at::Tensor causal_conv1d_tails(const CausalConv1d& given, const at::Tensor& ends);

}  // namespace espalier
