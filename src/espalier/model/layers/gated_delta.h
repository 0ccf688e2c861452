// SPDX-License-Identifier: Apache-2.0
// The Gated DeltaNet half of a decoder layer: projections, convolution, gated delta rule, gated norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/config/gated_delta_spec.h"
#include "espalier/model/layers/parameters.h"
#include "espalier/model/model.h"

namespace espalier {

class GatedDeltaLayer {
 public:
  GatedDeltaLayer(const GatedDeltaSpec& spec, const NamedParameters& parameters, double rms_norm_eps);

  /// Takes normalised hidden states [T, hidden_size]. Returns the branch output of the selected rows (see
  /// Model::layer; undefined if there are none), and the context at the sequence's cuts: states [C, H, Dk,
  /// Dv] in the accumulator dtype, and the convolution's tails [C, W - 1, channels]. Arithmetic as of
  /// Transformers' Qwen3_5GatedDeltaNet, gates and decays in float32 (float64 for float64).
  LayerOutput forward(int64_t index, const at::Tensor& hidden, const PositionTables&,
                      const SequenceOps& sequence, const at::Tensor& rows) const;

 private:
  /// q, k and v [T, conv_size()] before the convolution, z [T, value_size()], b and a [T, H].
  std::vector<at::Tensor> project(const at::Tensor& hidden) const;

  GatedDeltaSpec spec_;
  double rms_norm_eps_;
  std::vector<accumulating::Projection> in_;  // qkv, z, b and a; fused: qkvz and ba
  accumulating::Projection out_;
  at::Tensor conv_;             // [channels, 1, W]
  at::Tensor dt_bias_, a_log_;  // [H]
  at::Tensor norm_;             // [Dv]
};

}  // namespace espalier
