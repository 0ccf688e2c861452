// SPDX-License-Identifier: Apache-2.0
// The Gated DeltaNet half of a decoder layer: projections, convolution, gated delta rule, gated norm.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/config/gated_delta_spec.h"
#include "espalier/model/layers/parameters.h"
#include "espalier/model/model.h"

namespace espalier {

class GatedDeltaLayer {
 public:
  GatedDeltaLayer(const GatedDeltaSpec& spec, const NamedParameters& parameters, double rms_norm_eps);

  /// Of normalised hidden states [T, hidden_size]: what is added to the residual, of the wanted rows (see
  /// Model::layer; undefined where there are none), and the context at the sequence's cuts: states
  /// [C, H, Dk, Dv] in the dtype of sums, and the convolution's tails [C, W - 1, channels]. Arithmetic as of
  /// Transformers' Qwen3_5GatedDeltaNet, gates and decays in float32 (float64 for float64).
  LayerOutput forward(int64_t index, const at::Tensor& hidden, const PositionTables&,
                      const SequenceOps& sequence, const at::Tensor& rows) const;

 private:
  GatedDeltaSpec spec_;
  double rms_norm_eps_;
  accumulating::Projection in_qkv_, in_z_, in_b_, in_a_, out_;
  at::Tensor conv_;             // [channels, 1, W]
  at::Tensor dt_bias_, a_log_;  // [H]
  at::Tensor norm_;             // [Dv]
};

}  // namespace espalier
