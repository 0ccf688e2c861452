// SPDX-License-Identifier: Apache-2.0
// A plain sequence, as the layers of a model see it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "espalier/model/sequence_ops.h"

namespace espalier {

/// T tokens, of which each reads itself and all before it. Attention is LibTorch's.
class CausalSequence : public SequenceOps {
 public:
  explicit CausalSequence(int64_t num_tokens) : nodes_(make_node_structure({0, num_tokens}, {-1})) {}

  at::Tensor attention(int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       double softmax_scale) const override {
    const auto heads_first = [](const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
    return at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), {}, 0.0,
                                            /*is_causal=*/true, softmax_scale, /*enable_gqa=*/true)
        .squeeze(0)
        .transpose(0, 1);
  }

  const NodeStructure& nodes() const override { return nodes_; }

 private:
  NodeStructure nodes_;
};

}  // namespace espalier
