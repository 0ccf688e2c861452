// SPDX-License-Identifier: Apache-2.0
// Checks implementations of tree attention against the masked one in float64.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "espalier/ops/attention/arguments.h"
#include "espalier/qualify/qualify.h"

namespace espalier::qualify {

struct AwkwardForest {
  std::string name{};
  std::vector<int32_t> subtree_end{};  // of a forest in preorder
  // Context (ops/attention/tree_attention.h): tokens of each segment, and blocks of five numbers.
  std::vector<int64_t> segment_sizes{};
  std::vector<int64_t> context_blocks{};
  int64_t period = 0;  // period of keys and values in tokens; 0: none
  // Factor of queries. Larger values are not useful in float32, since backward recomputes probabilities from
  // rounded scores and log-sum-exp.
  double sharpness = 1;

  int64_t num_tokens() const { return static_cast<int64_t>(subtree_end.size()); }
};

/// Deterministic: one token, a chain, a star, nodes of single tokens, deep and wide trees, trajectories that
/// end inside, several trees, lengths at the borders of tiles, equal keys, a sharp softmax, and context from
/// ancestors: for all tokens, for some, nested, and with keys that are not visible.
std::vector<AwkwardForest> awkward_forests();

/// An implementation of tree_attention and its backward. Forward must be bitwise reproducible, and so must
/// backward while at::globalContext().deterministicAlgorithms().
struct AttentionFamily {
  std::string name{};
  std::vector<at::ScalarType> dtypes{};
  std::vector<int64_t> head_dims{};
  /// Which listed dtypes and head dimensions it supports on this device.
  std::function<bool(at::ScalarType dtype, int64_t head_dim)> serves{};
  std::function<detail::TreeAttentionResults(const detail::TreeAttentionArguments&)> forward{};
  std::function<detail::TreeAttentionGradients(const detail::TreeAttentionArguments&,
                                               const at::Tensor& grad_out, const at::Tensor& out,
                                               const at::Tensor& lse)>
      backward{};
};

/// Runs the family on all awkward forests, forward and backward, with and without
/// deterministic algorithms, each twice, with output guards (ops/guarded_output.h), and compares each kind of
/// result by pooled_errors.h: exact values are from the masked implementation in float64 on the CPU, the
/// plain form is reference::tree_attention in the family's dtype on the device. Stops at the first dtype and
/// head dimension with a fault. Restores the setting of deterministic algorithms.
Finding check_attention(const AttentionFamily& family, at::Device device);

}  // namespace espalier::qualify
