// SPDX-License-Identifier: Apache-2.0
// The forward pass of one micro-batch, and the context that it passes to its descendants.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "espalier/engine/batch.h"
#include "espalier/model/model.h"
#include "espalier/model/sequence_ops.h"

namespace espalier {

/// The context of one micro-batch by layer: keys and values, or states and convolution tails. Descendants
/// read it as leaf tensors that require grad. The gradients that their backward passes leave there are summed
/// in float32 at least, and seed the backward pass of the micro-batch itself.
class ContextFrame {
 public:
  /// `live`: the tensors of the forward pass by layer. `offload`: keep them and their gradient sums in host
  /// memory and copy them to the device for each reader; on CUDA asynchronously in the current stream, from
  /// pinned memory.
  ContextFrame(const std::vector<LayerContext>& live, bool offload);

  /// The layer's tensors, for the forward pass of a descendant.
  const LayerContext& leaves(int64_t layer);

  /// Call after each backward pass of a descendant, or after a forward pass without backward: adds gradients,
  /// if any, to the sums and frees offloaded leaves.
  void collect();

  /// Appends the tensors of `live` (the same as above, in the graph) that require grad and have a nonzero
  /// gradient, and those gradients.
  void append_seeds(const std::vector<LayerContext>& live, std::vector<at::Tensor>* tensors,
                    std::vector<at::Tensor>* gradients) const;

 private:
  bool offload_;
  std::vector<at::Device> devices_;          // by layer, for readers
  std::vector<LayerContext> kept_;           // detached; on the host when offloaded
  std::vector<LayerContext> leaves_;         // require gradients; share storage with kept_ unless offloaded
  std::vector<LayerContext> gradient_sums_;  // undefined: zero, or still in the leaf's grad
};

/// Holds its tensors by value, because recomputed layers use it after the forward pass.
class TreeSequence : public SequenceOps {
 public:
  /// `ancestors`: the frames of batch.ancestors, in that order; they must outlive the backward pass.
  /// `statistics`, `record`: see RouterContext.
  TreeSequence(const Batch& batch, std::span<ContextFrame* const> ancestors,
               c10::intrusive_ptr<RouterStatistics> statistics = {}, RouterRecord* record = nullptr);

  at::Tensor attention(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOptions& options) const override;
  const NodeStructure& nodes() const override { return *nodes_; }
  std::vector<at::Tensor> cut_context(int64_t layer) const override;
  RouterContext routers() const override { return routers_; }
  const std::shared_ptr<const accumulating::RowAdapters>& adapters() const { return adapters_; }

 private:
  at::Tensor subtree_end_, position_ids_;
  at::Tensor context_blocks_, context_positions_;
  std::shared_ptr<const NodeStructure> nodes_;
  std::vector<ContextFrame*> ancestors_;
  RouterContext routers_;
  std::shared_ptr<const accumulating::RowAdapters> adapters_;
  std::shared_ptr<const BatchPart> part_;
};

/// Whether entropies are computed, and whether they are in the graph.
enum class Entropies { kNone, kDetached, kDifferentiable };

struct ForwardOptions {
  bool keep_context = false;                                 // return the context for descendants
  bool checkpoint_layers = false;                            // save only the inputs of layers
  bool head = true;                                          // compute log-probabilities
  Entropies entropies = Entropies::kNone;                    // compute entropies; log-probabilities are
                                                             // unaffected by kDetached
  c10::intrusive_ptr<RouterStatistics> router_statistics{};  // null: none
  RouterRecord* router_record = nullptr;                     // if set, appended to
  std::function<void(int64_t layer)> left{};  // called in the backward pass: it has left this layer
};

struct ForwardResult {
  at::Tensor logprobs;  // [E] of the batch's edges, float32 (float64 for float64 models)
  at::Tensor entropy;   // likewise, if requested
  at::Tensor last;      // what the last layer gives, if routers have losses (hidden states of all
                        // tokens) or the batch is a part (without the LM head: keys)
  std::vector<LayerContext> context;  // by layer, in the graph; empty unless kept
};

/// `ancestors`: the frames of batch.ancestors, in that order; they must outlive the backward pass.
ForwardResult forward(const Model& model, const Batch& batch, std::span<ContextFrame* const> ancestors,
                      const ForwardOptions& options);

}  // namespace espalier
