// SPDX-License-Identifier: Apache-2.0
// Tiny decoders of every family.
#pragma once

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

#include "espalier/config/config.h"
#include "espalier/model/decoder.h"
#include "espalier/ops/attention/tree_attention.h"
#include "tests/config/tiny_config.h"
#include "tests/ops/attention/reference.h"
#include "tests/torch_seed.h"

namespace espalier::testing {

/// A decoder of that config with random parameters, norms and biases included.
inline Decoder tiny_decoder(const nlohmann::ordered_json& json, at::ScalarType dtype, uint64_t seed) {
  DecoderConfig config = parse_config(json, "config.json");
  seed_torch(seed);
  std::vector<Parameter> parameters;
  for (const ParameterShape& shape : parameter_shapes(config)) {
    at::Tensor value = at::randn(shape.shape, at::kDouble) * 0.3;
    if (shape.name.find("norm") != std::string::npos) value += 1;
    parameters.push_back({shape.name, value.to(dtype).set_requires_grad(true)});
  }
  std::vector<Parameter> buffers;
  for (const ParameterShape& shape : buffer_shapes(config)) {
    const at::Tensor value = at::randn(shape.shape, at::kDouble) * 0.3;
    buffers.push_back({shape.name, value.to(dtype == at::kDouble ? dtype : at::kFloat)});
  }
  return Decoder(std::move(config), std::move(parameters), std::move(buffers));
}

/// Ordinary causal attention over one sequence.
inline at::Tensor dense_causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                         const AttentionOptions& options) {
  const int64_t length = q.size(0);
  const ForestTokens path{at::full({length}, length, at::kInt), at::arange(length, at::kInt)};
  return reference::tree_attention(q, k, v, path, options);
}

/// A sequence whose attention is a function of q, k, v and the options.
class FunctionSequence : public SequenceOps {
 public:
  using Function = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                            const AttentionOptions& options)>;
  explicit FunctionSequence(Function function) : function_(std::move(function)) {}
  at::Tensor attention(int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOptions& options) const override {
    return function_(q, k, v, options);
  }
  const NodeStructure& nodes() const override { return nodes_; }
  std::vector<at::Tensor> cut_context(int64_t) const override { return {}; }

 private:
  Function function_;
  NodeStructure nodes_;  // attention needs none
};

inline const FunctionSequence causal_attention(dense_causal_attention);

}  // namespace espalier::testing
