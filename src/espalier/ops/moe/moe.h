// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: each token passes a few of many MLPs, chosen by a router (Shazeer et al., "Outrageously
// large neural networks", 2017; docs/math.md). No token is dropped, however many choose one expert.
// Deterministic, whatever the number of threads, as far as the experts' products are. All throw on mismatched
// shapes, dtypes or devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>

#include "espalier/ops/argument.h"

namespace espalier {

/// How a router chooses among E experts.
struct RouterOptions {
  int64_t top_k = 1;            // experts of each token, 1 to E
  bool sigmoid = false;         // scores are sigmoids of the logits; otherwise their softmax
  bool normalise = false;       // the weights of a token are divided by their sum (plus 1e-20)
  double scaling = 1;           // factor of all weights, after that
  int64_t num_groups = 1;       // a divisor of E; with several, each has two experts or more
  int64_t num_best_groups = 1;  // groups that a token chooses from: those whose two best experts sum to most
  bool softmax_over_chosen = false;  // scores are the logits; weights the softmax of the chosen ones

  static auto all(auto& given) {
    return std::tie(given.top_k, given.sigmoid, given.normalise, given.scaling, given.num_groups,
                    given.num_best_groups, given.softmax_over_chosen);
  }
};

/// The experts of T tokens.
struct Routing {
  at::Tensor weights;  // [T, top_k] float32 (float64), differentiable
  at::Tensor experts;  // [T, top_k] int64, ascending in each row
};

/// The routing by `logits` [T, E] float32 or float64, differentiable in them through the weights. Experts are
/// those of the largest scores, with `correction_bias` [E] (DeepSeek-V3, 2024, section 2.1.2), which has no
/// part in the weights, added to the scores where it is given; among equal scores those of torch.topk. A
/// token's routing depends on its own logits alone. `experts` [T, top_k], where they are given, are taken
/// instead of choosing, so that a pass can be repeated with the same choices; a row of -1 chooses.
/// Registered as torch.ops.espalier.moe_route(logits, correction_bias, experts, top_k, ...) -> (weights,
/// experts).
Routing route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
              const RouterOptions& options, const std::optional<at::Tensor>& experts = {});

/// Rows [R, C] of one expert, R > 0, to its outputs [R, C] of the same dtype; differentiable.
using ExpertFunction = std::function<at::Tensor(int64_t expert, const at::Tensor& rows)>;

/// x [T, C], T > 0 -> [T, C]: the sum over each token's experts, in the order of their numbers, of weight
/// times output; summed in float32 (float64) and rounded once. Differentiable in x and the weights, and in
/// whatever `expert` is differentiable in. It is called once for each of the `num_experts` that has tokens,
/// by number, with these tokens in order. Reads the number of tokens of each expert, so that the host waits
/// for a device.
at::Tensor moe(const at::Tensor& x, const Routing& routing, int64_t num_experts,
               const ExpertFunction& expert);

/// Of the activation (up' + 1) gate' sigmoid(alpha gate'), clamped by limit (elementwise/activations.h).
struct ClampedActivation {
  double alpha = 1.702;
  double limit = 7;
};

/// E experts in tensors of the dtype of x: down(silu(gate(x)) * up(x)) in the layout of Transformers 5, or
/// with `clamped` down(clamped_swiglu(gate_up(x))) in that of its gpt_oss.
struct ExpertWeights {
  at::Tensor gate_up;            // [E, 2 I, C], gate before up; clamped: [E, C, 2 I], gate and up in turn
  at::Tensor down;               // [E, C, I]; clamped: [E, I, C]
  at::Tensor gate_up_bias = {};  // [E, 2 I], in the order of gate_up; undefined: none
  at::Tensor down_bias = {};     // [E, C]; undefined: none
  std::optional<ClampedActivation> clamped = {};
};

/// moe of these experts, differentiable in their tensors as well. Registered as torch.ops.espalier.moe(x,
/// weights, experts, gate_up, down, gate_up_bias=None, down_bias=None, clamp_limit=None, clamp_alpha=1.702);
/// clamp_limit makes them clamped. The operator keeps its inputs alone: backward computes the experts again.
at::Tensor moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts);

/// Plain forms, composed of ATen's operators and differentiated by autograd, which tests compare with.
namespace reference {

/// Token by token.
Routing route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
              const RouterOptions& options);
at::Tensor moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts);

}  // namespace reference

}  // namespace espalier
