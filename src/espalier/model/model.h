// SPDX-License-Identifier: Apache-2.0
// What the engine asks of a model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/model/sequence_ops.h"
#include "espalier/ops/edge_logprobs/edge_distribution.h"

namespace espalier {

struct Parameter {
  std::string name;  // as in the checkpoint: model.layers.0.self_attn.q_proj.weight
  at::Tensor value;  // leaf, requires_grad
};

/// What a layer leaves to the descendants of a micro-batch, as tensors that carry gradients. An attention
/// layer: k (rotated) and v [T, K, D] of the micro-batch's tokens.
using LayerContext = std::vector<at::Tensor>;

/// What layers read of the positions: of a decoder with rotary embedding cos and sin [T, head_dim / 2], and
/// where layers with a sliding window have a rope of their own, cos and sin of that.
using PositionTables = std::vector<at::Tensor>;

struct LayerOutput {
  at::Tensor hidden;  // [T, hidden_size], or [R, hidden_size] of R tokens
  LayerContext context;
};

/// Log-probabilities of edges that start at R of the tokens.
struct Edges {
  at::Tensor row;     // [E] int64, ascending, into the R tokens
  at::Tensor target;  // [E] int64, token ids
};

/// A causal language model in parts, so that its layers can be checkpointed one by one and their context can
/// go to other micro-batches: logprobs(layer(L - 1, ... layer(0, embed(input_ids), ...)), edges).
/// Gradients of parameters are accumulated in their .grad (model/gradient_accumulation.h).
class Model {
 public:
  virtual ~Model() = default;

  virtual int64_t num_layers() const = 0;
  virtual int64_t vocab_size() const = 0;
  virtual RouterShape routers() const { return {}; }

  /// The sizes of the sliding windows of its attention, ascending, each once.
  virtual std::vector<int64_t> sliding_windows() const { return {}; }

  /// Hidden states [T, hidden_size] of input_ids [T] int64.
  virtual at::Tensor embed(const at::Tensor& input_ids) const = 0;

  /// Of position_ids [T] int64, once for all layers.
  virtual PositionTables position_tables(const at::Tensor& position_ids) const = 0;

  /// `rows` [R] int64, ascending: the tokens whose hidden state is wanted, all where it is undefined. What
  /// comes after the mixer is computed for them alone, and nothing but the context where there are none.
  virtual LayerOutput layer(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                            const SequenceOps& sequence, const at::Tensor& rows) const = 0;

  /// Log-probabilities [E] of edges, float32 (float64 for float64 models), from the last layer's hidden
  /// states [R, hidden_size].
  virtual at::Tensor logprobs(const at::Tensor& hidden, const Edges& edges) const = 0;

  /// The same with the entropies [E] of the distributions that the targets are drawn from, in nats; where
  /// weights are narrower than float32 they are upcast for it.
  virtual EdgeDistribution distribution(const at::Tensor& hidden, const Edges& edges) const = 0;

  /// What is trained: all weights, or of a model with an adapter the adapter's.
  virtual const std::vector<Parameter>& parameters() const = 0;

  /// Of parameters and everything computed from them.
  virtual at::Device device() const = 0;

  /// Gradients of all parameters, in their order, summed over backward passes since zero_gradients in float32
  /// (float64 for float64 models): their .grad. Undefined where there were none.
  std::vector<at::Tensor> gradients() const;
  void zero_gradients() const;

  /// Makes zeros of gradients that are undefined, so that all have one: a reduction over processes needs the
  /// same tensors everywhere.
  void complete_gradients() const;
};

}  // namespace espalier
