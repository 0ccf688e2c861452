// SPDX-License-Identifier: Apache-2.0
// The interface of models to the engine.
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

/// The tensors of a layer that descendants of a micro-batch read, differentiable. For attention: k (rotated)
/// and v [T, K, D] of the micro-batch's tokens.
using LayerContext = std::vector<at::Tensor>;

/// Tables computed from positions: cos and sin [T, head_dim / 2] of a rotary embedding, followed by those of
/// a separate embedding of layers with a sliding window, if there is one.
using PositionTables = std::vector<at::Tensor>;

struct LayerOutput {
  at::Tensor hidden;  // [T, hidden_size], or [R, hidden_size] of R selected tokens
  LayerContext context;
};

/// E edges whose sources are among R tokens.
struct Edges {
  at::Tensor row;               // [E] int64, ascending, into the R tokens
  at::Tensor target;            // [E] int64, token ids
  at::Tensor temperature = {};  // [E] above 0: what divides the logits of an edge; undefined: 1 for all
};

/// A causal language model, split into parts so that layers can be checkpointed one by one and their context
/// can be passed to other micro-batches: logprobs(layer(L - 1, ... layer(0, embed(input_ids), ...)), edges).
/// Gradients of parameters are accumulated in their .grad (model/gradient_accumulation.h).
class Model {
 public:
  virtual ~Model() = default;

  virtual int64_t num_layers() const = 0;
  virtual int64_t vocab_size() const = 0;
  virtual RouterShape routers() const { return {}; }

  /// The distinct sizes of sliding windows of attention, ascending.
  virtual std::vector<int64_t> sliding_windows() const { return {}; }

  /// Hidden states [T, hidden_size] for input_ids [T] int64.
  virtual at::Tensor embed(const at::Tensor& input_ids) const = 0;

  /// The tables for position_ids [T] int64, used by all layers.
  virtual PositionTables position_tables(const at::Tensor& position_ids) const = 0;

  /// `rows` [R] int64, ascending: the tokens whose hidden states are returned; undefined: all. Everything
  /// after the mixer is computed for these rows only. With R = 0 only the context is computed.
  virtual LayerOutput layer(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                            const SequenceOps& sequence, const at::Tensor& rows) const = 0;

  /// Log-probabilities [E] of edges, float32 (float64 for float64 models), from the last layer's hidden
  /// states [R, hidden_size].
  virtual at::Tensor logprobs(const at::Tensor& hidden, const Edges& edges) const = 0;

  /// The same with the entropies [E] of the distributions at the sources of edges, in nats. Weights narrower
  /// than float32 are upcast for it.
  virtual EdgeDistribution distribution(const at::Tensor& hidden, const Edges& edges) const = 0;

  /// The trained parameters: all weights, or those of the adapter.
  virtual const std::vector<Parameter>& parameters() const = 0;

  /// The device of parameters and activations.
  virtual at::Device device() const = 0;

  /// Gradients of all parameters, in their order, summed over backward passes since zero_gradients in float32
  /// (float64 for float64 models): their .grad. Undefined if there were none.
  std::vector<at::Tensor> gradients() const;
  void zero_gradients() const;
};

/// Sets an undefined gradient to zeros, so that a reduction over processes has the same tensors everywhere.
void complete_gradient(const at::Tensor& parameter);

/// L2 norm over all gradients, summed in float64; undefined ones count as zero. All must be on one device,
/// which is synchronised once.
double global_norm(std::vector<at::Tensor> gradients);

}  // namespace espalier
