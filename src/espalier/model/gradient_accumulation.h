// SPDX-License-Identifier: Apache-2.0
// Operators of parameters and activations that sum the parameters' gradients in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "espalier/ops/edge_logprobs/edge_distribution.h"
#include "espalier/ops/gemm/prepared_weight.h"
#include "espalier/ops/scoped_value.h"

namespace espalier::accumulating {

// Backward adds the gradient of a parameter to its .grad, which is float32 for bfloat16 parameters and made
// where it is undefined. So gradients of many micro-batches add up without a temporary of the parameter's
// size and without further passes over it. They come by torch::autograd::backward alone:
// torch::autograd::grad does not see them. Parameters that do not require gradients get none.

/// Adds to the .grad of a parameter as said above; `gradient` has its shape.
void add_gradient(const at::Tensor& parameter, const at::Tensor& gradient);

/// What is added to a projection: scale (x a^T) b^T. In the dtype of sums, in which it is computed.
struct LowRank {
  at::Tensor a{};  // [rank, in]; undefined: nothing is added
  at::Tensor b{};  // [out, rank]
  double scale = 0;
};

struct Projection {
  at::Tensor weight;  // [out, in]
  at::Tensor bias{};  // [out], or undefined
  LowRank adapter{};
};

/// x [T, in] -> x weight^T + bias [T, out], and what the adapter adds; rounded once. x is kept for backward
/// where the weight or an adapter has a gradient.
at::Tensor linear(const at::Tensor& x, const Projection& projection);

/// The same for several projections of one x, whose gradient is then summed in place, in the dtype of sums.
std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<Projection>& projections);

/// N projections in one parameter each of weights and biases, as experts have them.
struct StackedProjections {
  at::Tensor weight;  // [N, in, out]
  at::Tensor bias;    // [N, out]
};

/// x [T, in] -> x weight[index] + bias[index] [T, out].
at::Tensor stacked_linear(const at::Tensor& x, const StackedProjections& projections, int64_t index);

/// x weight^T + bias [T, out] in the dtype of sums, neither operands nor result rounded: for routers, whose
/// choices hang on small differences. For few rows of weight [out, in]: a bfloat16 model's operands are
/// upcast each time.
at::Tensor unrounded_linear(const at::Tensor& x, const Projection& projection);

/// What is made of weights once, for passes that follow each other.
template <class Made, detail::Scope kNumber>
class KeptWeights {
 public:
  static constexpr detail::Scope kScope = kNumber;

  /// What make() made of the weight, which is made anew where the weight has changed.
  template <class Make>
  const Made& get(const at::Tensor& weight, const Make& make) {
    Kept& kept = kept_[weight.const_data_ptr()];
    if (!kept.made || kept.version != weight._version()) kept = {weight, weight._version(), make()};
    return *kept.made;
  }

 private:
  struct Kept {
    at::Tensor weight;  // held, so that nothing else comes to lie at its place
    int64_t version = 0;
    std::optional<Made> made;
  };
  std::unordered_map<const void*, Kept> kept_;
};

/// While it lives, weights that linears have to upcast for their products (product_dtype in
/// ops/gemm/matrix_product.h) are upcast once and stay so, for passes that follow each other with the same
/// weights; one that has changed is upcast anew. For passes on the CPU in the thread that made it, backward
/// included.
using UpcastWeights = detail::ScopedValue<KeptWeights<at::Tensor, detail::Scope::kUpcastWeights>>;

/// Rows `input_ids` [T] int64 of weight [V, C] -> [T, C]. `frozen_row` gets no gradient; -1: all do.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& input_ids, int64_t frozen_row = -1);

/// A small parameter in the dtype of sums.
at::Tensor unrounded(const at::Tensor& parameter);

/// The root mean square norm of ops/elementwise/elementwise.h. x [..., C], weight [C]. Keeps x and 1 / rms
/// for backward, nothing else of the size of x, which is of the dtype of the weight or of sums.
/// `zero_centered`: multiplies by 1 + weight, and rounds once, after that, as Transformers does in such
/// models.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool zero_centered = false);

/// The sum of a residual branch and its norm, for the price of one pass. Keeps the sum and 1 / rms.
struct NormOfSum {
  at::Tensor sum;         // x + addend
  at::Tensor normalised;  // rms_norm of the sum
};
NormOfSum add_rms_norm(const at::Tensor& x, const at::Tensor& addend, const at::Tensor& weight, double eps,
                       bool zero_centered = false);

/// edge_logprobs (ops/edge_logprobs/edge_logprobs.h) of the LM head, which has no bias. Its adapter is
/// rounded to the dtype of the weight for the product of both.
at::Tensor head_logprobs(const at::Tensor& hidden, const Projection& head, const at::Tensor& edge_row,
                         const at::Tensor& edge_target);

/// The same with entropies: edge_distribution (ops/edge_logprobs/edge_distribution.h), in the dtype of sums.
/// `transform`: edge_temperature of any dtype, and softcap.
EdgeDistribution head_distribution(const at::Tensor& hidden, const Projection& head,
                                   const at::Tensor& edge_row, const at::Tensor& edge_target,
                                   const LogitTransform& transform);

/// Two matrices whose product hidden weight^T has the logits of the LM head, adapter included, for operators
/// that take them. Runs without autograd.
struct HeadFactors {
  at::Tensor hidden, weight;
};
HeadFactors head_factors(const at::Tensor& hidden, const Projection& head);

/// While it lives, linears (model/gradient_accumulation.h) multiply by weights that are made ready once
/// (ops/gemm/prepared_weight.h): a pass of a few rows would otherwise take most of its time for that. One
/// that has changed is made ready anew. For passes without gradients, in the thread that made it.
using PreparedWeights =
    detail::ScopedValue<KeptWeights<detail::PreparedWeight, detail::Scope::kPreparedWeights>>;

/// The prepared form of a weight [N, K]; null without PreparedWeights.
const detail::PreparedWeight* prepared(const at::Tensor& weight);

/// Logits [T, V] of the LM head, in the accumulator dtype. Runs without autograd.
at::Tensor head_logits(const at::Tensor& hidden, const Projection& head);

}  // namespace espalier::accumulating
