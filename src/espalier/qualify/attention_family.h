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
