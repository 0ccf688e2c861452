// SPDX-License-Identifier: Apache-2.0
// A single sequence with ordinary causal attention, as SequenceOps for the layers of a model.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "espalier/model/sequence_ops.h"

namespace espalier {

/// T tokens with causal attention, optionally in a sliding window. Uses LibTorch's attention, or with sinks
/// or a softcap, which that lacks, a softmax over all keys and the sink.
class CausalSequence : public SequenceOps {
 public:
  explicit CausalSequence(int64_t num_tokens, RouterContext routers = {})
      : nodes_(make_node_structure({0, num_tokens}, {-1})), routers_(std::move(routers)) {}

  at::Tensor attention(int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOptions& options) const override {
    if (options.sinks.defined() || options.softcap > 0) return plain_attention(q, k, v, options);
    const auto heads_first = [](const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
    const bool windowed = options.sliding_window > 0;
    const std::optional<at::Tensor> mask = windowed ? std::optional(visible(q, options)) : std::nullopt;
    return at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), mask, 0.0,
                                            /*is_causal=*/!windowed, options.softmax_scale,
                                            /*enable_gqa=*/true)
        .squeeze(0)
        .transpose(0, 1);
  }

  const NodeStructure& nodes() const override { return nodes_; }
  std::vector<at::Tensor> cut_context(int64_t) const override { return {}; }
  RouterContext routers() const override { return routers_; }

 private:
  /// [T, T] bool mask: row j sees columns up to j, with a window only the last of them.
  static at::Tensor visible(const at::Tensor& q, const AttentionOptions& options) {
    const at::Tensor all = at::ones({q.size(0), q.size(0)}, q.options().dtype(at::kBool)).tril();
    return options.sliding_window > 0 ? all.triu(1 - options.sliding_window) : all;
  }

  static at::Tensor plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const AttentionOptions& options) {
    const int64_t group = q.size(1) / k.size(1);
    const at::Tensor keys = k.repeat_interleave(group, 1), values = v.repeat_interleave(group, 1);
    at::Tensor scores = at::einsum("jhd,ihd->hji", {q, keys}).mul(options.softmax_scale);
    if (options.softcap > 0) scores = scores.div(options.softcap).tanh().mul(options.softcap);
    scores = scores.masked_fill(visible(q, options).logical_not(), -std::numeric_limits<double>::infinity());
    if (!options.sinks.defined()) return at::einsum("hji,ihd->jhd", {scores.softmax(-1), values});
    const at::Tensor sinks = options.sinks.to(q.scalar_type()).view({-1, 1, 1}).expand({-1, q.size(0), 1});
    const at::Tensor weights = at::cat({scores, sinks}, -1).softmax(-1).slice(-1, 0, q.size(0));
    return at::einsum("hji,ihd->jhd", {weights, values});
  }

  NodeStructure nodes_;
  RouterContext routers_;
};

}  // namespace espalier
