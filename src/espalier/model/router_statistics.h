// SPDX-License-Identifier: Apache-2.0
// Statistics of the routers over a step, and the router losses (docs/math.md, "Mixture of experts").
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <vector>

#include "espalier/config/layer_spec.h"

namespace espalier {

struct RouterLossOptions {
  double aux_coef = 0;  // coefficient of the load-balancing loss
  double z_coef = 0;    // coefficient of the z-loss

  bool any() const { return aux_coef != 0 || z_coef != 0; }
};

/// Router losses and load over a step.
struct RouterReport {
  double aux_loss = 0;  // without coefficient; 0 if its coefficient is 0
  double z_loss = 0;    // likewise
  double load_max = 0;  // tokens of the most loaded expert of any layer / mean over experts
  double load_min = 0;  // likewise, least loaded
};

/// Sums over the tokens of a step, weighted by multiplicity, in float64 on the device. With N flat tokens, L
/// routers, E experts, n_e tokens sent to expert e by all routers, and p_e the sum of its probabilities
/// (normalised scores):
///   load-balancing loss  E sum_e (n_e / LN) (p_e / LN)   (Switch Transformer, 2021, eq. 4 to 6, as
///     Transformers sums it over layers; n_e has no gradient)
///   z-loss               1 / LN  sum over tokens and routers of logsumexp(logits)^2   (ST-MoE, 2022, eq. 5)
/// Gradients are added in the backward pass of with_losses, when all n_e must be known. So steps may be split
/// into micro-batches, and layers recomputed, in any way.
class RouterStatistics : public torch::CustomClassHolder {
 public:
  /// `num_tokens`: N, the flat tokens of the step.
  RouterStatistics(const RouterShape& shape, const RouterLossOptions& options, int64_t num_tokens,
                   at::Device device);

  const RouterLossOptions& options() const { return options_; }

  /// Whether add() has an effect. The engine enables it once per token of the step.
  void set_counting(bool counting) { counting_ = counting; }

  /// Adds the outputs of router `router` (0 to L - 1) for R tokens: logits [R, E], experts [R, top_k],
  /// multiplicity [R] float64.
  void add(int64_t router, const at::Tensor& logits, bool sigmoid, const at::Tensor& experts,
           const at::Tensor& multiplicity);

  /// Returns the logits; backward adds the gradient of the losses to theirs.
  at::Tensor with_losses(const at::Tensor& logits, bool sigmoid, const at::Tensor& multiplicity);

  /// Contribution of R tokens to the losses, with coefficients: a scalar, differentiable in the logits.
  at::Tensor losses_of(const at::Tensor& logits, bool sigmoid, const at::Tensor& multiplicity) const;

  /// Tensors that several processes may add up in place, after add() and before anything is computed of them.
  std::vector<at::Tensor> sums() const { return {counts_, probabilities_, z_}; }

  /// The values that report() needs, [2 + L E] float64 on the device.
  at::Tensor values() const;
  /// `values`: values() copied to the host.
  static RouterReport report(const at::Tensor& values, const RouterShape& shape);

 private:
  RouterShape shape_;
  RouterLossOptions options_;
  double rows_;  // L N
  bool counting_ = false;
  at::Tensor counts_;         // [L, E]
  at::Tensor probabilities_;  // [E]
  at::Tensor z_;              // []
};

/// Outputs of the routers of a pass for their R tokens, in layer order.
struct RouterRecord {
  std::vector<at::Tensor> logits;   // [R, experts], in the graph
  std::vector<at::Tensor> experts;  // [R, top_k] int64, ascending in each row
};

/// Inputs for T tokens.
struct RouterContext {
  /// [T, W] int64: experts that override the routers' choices: top_k per router (W = routers * top_k), or per
  /// layer (W = layers * top_k; layers without router are ignored). -1: the router chooses. Undefined:
  /// routers choose everywhere.
  at::Tensor routes = {};
  at::Tensor multiplicity = {};  // [T] float64: trajectories through the token, for statistics
  c10::intrusive_ptr<RouterStatistics> statistics{};  // null: none
  RouterRecord* record = nullptr;                     // if set, appended to
};

}  // namespace espalier
