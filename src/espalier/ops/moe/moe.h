// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: each token is processed by a few of many MLPs, chosen by a router (Shazeer et al.,
// "Outrageously large neural networks", 2017; docs/math.md). There is no capacity limit, so no token is
// dropped. Deterministic for any number of threads, if the experts' products are. All throw on mismatched
// shapes, dtypes or devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>

#include "espalier/ops/argument.h"

namespace espalier {

/// Options of a router over E experts.
struct RouterOptions {
  int64_t top_k = 1;            // experts per token, 1 to E
  bool sigmoid = false;         // scores are sigmoids of the logits; otherwise their softmax
  bool normalise = false;       // divide the weights of a token by their sum (plus 1e-20)
  double scaling = 1;           // factor of all weights, applied last
  int64_t num_groups = 1;       // divides E; if more than 1, groups must have at least two experts
  int64_t num_best_groups = 1;  // groups to choose from: those with the largest sum of their two best scores
  bool softmax_over_chosen = false;  // scores are logits; weights are the softmax over the chosen experts

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

/// The routing for `logits` [T, E], float32 or float64; weights are differentiable in logits. Chooses the
/// experts with the largest scores (ties as in torch.topk), optionally with `correction_bias` [E]
/// (DeepSeek-V3, 2024, section 2.1.2) added for the choice but not for the weights. The routing of a token
/// depends only on its own logits. `experts` [T, top_k], if given, override the choice; rows of -1 do not.
/// Registered as torch.ops.espalier.moe_route(logits, correction_bias, experts, top_k, ...) -> (weights,
/// experts).
Routing route(const at::Tensor& logits, const std::optional<at::Tensor>& correction_bias,
              const RouterOptions& options, const std::optional<at::Tensor>& experts = {});

/// Maps rows [R, C] of one expert, R > 0, to outputs [R, C] of the same dtype; differentiable.
using ExpertFunction = std::function<at::Tensor(int64_t expert, const at::Tensor& rows)>;

/// x [T, C], T > 0 -> [T, C]: the sum over each token's experts, in ascending order, of weight times output;
/// summed in float32 (float64) and rounded once. Differentiable in x and the weights, and in whatever
/// `expert` is differentiable in. It is called once per expert that has tokens, in ascending order, with its
/// tokens in order. Synchronises with the device to read the number of tokens of each expert.
at::Tensor moe(const at::Tensor& x, const Routing& routing, int64_t num_experts,
               const ExpertFunction& expert);

/// Parameters of clamped_swiglu (elementwise/activations.h).
struct ClampedActivation {
  double alpha = 1.702;
  double limit = 7;
};

/// E experts in tensors of the dtype of x: down(silu(gate(x)) * up(x)) with the weight layout of Transformers
/// 5, or with `clamped` down(clamped_swiglu(gate_up(x))) with that of its gpt_oss.
struct ExpertWeights {
  at::Tensor gate_up;            // [E, 2 I, C], gate before up; clamped: [E, C, 2 I], gate and up interleaved
  at::Tensor down;               // [E, C, I]; clamped: [E, I, C]
  at::Tensor gate_up_bias = {};  // [E, 2 I], in the order of gate_up; undefined: none
  at::Tensor down_bias = {};     // [E, C]; undefined: none
  std::optional<ClampedActivation> clamped = {};
};

/// moe with these experts, also differentiable in their weights. Registered as torch.ops.espalier.moe(x,
/// weights, experts, gate_up, down, gate_up_bias=None, down_bias=None, clamp_limit=None, clamp_alpha=1.702);
/// clamp_limit enables clamping. Backward saves only the inputs and recomputes the experts.
at::Tensor moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts);

/// The same by two grouped products of ATen (_grouped_mm) and without waiting for the device: what moe does
/// on GPUs in bfloat16. float32 and bfloat16; experts must be below E.
at::Tensor grouped_moe(const at::Tensor& x, const Routing& routing, const ExpertWeights& experts);

}  // namespace espalier
