// SPDX-License-Identifier: Apache-2.0
// The context that a micro-batch passes to its descendants, and the gradients they return.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/model/model.h"

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

}  // namespace espalier
