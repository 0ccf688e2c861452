// SPDX-License-Identifier: Apache-2.0
// Context between micro-batches: what one leaves to its descendants, and the gradients they send back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/model/model.h"

namespace espalier {

/// The context of one micro-batch, layer by layer. Descendants read it as leaf tensors that require
/// gradients; what their backward passes leave there is summed, in float32 at least, and seeds the backward
/// pass of the micro-batch itself. Knows nothing of what the tensors mean: keys and values of attention, the
/// states and convolution tails of recurrent layers are all the same here.
class ContextFrame {
 public:
  /// `live`: per layer, the tensors as the forward pass made them. `offload`: they wait in host memory, as do
  /// the sums of their gradients, and are copied back to their device for each reader: on CUDA in pinned
  /// memory and in the order of the current stream, so that nobody waits.
  ContextFrame(const std::vector<LayerContext>& live, bool offload);

  /// The layer's tensors, to be read by the forward pass of a descendant.
  const LayerContext& leaves(int64_t layer);

  /// Call after each backward pass of a descendant: adds the gradients to the sums and forgets offloaded
  /// leaves. Without gradients (a forward pass alone) it only forgets.
  void collect();

  /// Appends those of `live` (the same tensors in the graph) that require a gradient and have one which is
  /// not zero, and their gradients.
  void append_seeds(const std::vector<LayerContext>& live, std::vector<at::Tensor>* tensors,
                    std::vector<at::Tensor>* gradients) const;

 private:
  bool offload_;
  std::vector<at::Device> devices_;          // by layer, where readers want it
  std::vector<LayerContext> kept_;           // detached; on the host when offloaded
  std::vector<LayerContext> leaves_;         // require gradients; share storage with kept_ unless offloaded
  std::vector<LayerContext> gradient_sums_;  // undefined: zero, or still in the leaf's own gradient
};

}  // namespace espalier
