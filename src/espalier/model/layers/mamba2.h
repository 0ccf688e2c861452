// SPDX-License-Identifier: Apache-2.0
// The Mamba-2 half of a decoder layer: projection, convolution, selective state space, gated norm.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/config/ssm_spec.h"
#include "espalier/model/layers/parameters.h"
#include "espalier/model/model.h"

namespace espalier {

class Mamba2Layer {
 public:
  Mamba2Layer(const SsmSpec& spec, const NamedParameters& parameters, double rms_norm_eps);

  /// Takes normalised hidden states [T, hidden_size]. Returns the branch output of the selected rows (see
  /// Model::layer; undefined if there are none), and the context at the sequence's cuts: states [C, H, N, P]
  /// in the accumulator dtype, and the convolution's tails [C, W - 1, channels]. Arithmetic as of
  /// Transformers' Mamba2Mixer; steps, decays and the gated norm in float32 (float64 for float64).
  LayerOutput forward(int64_t index, const at::Tensor& hidden, const PositionTables&,
                      const SequenceOps& sequence, const at::Tensor& rows) const;

 private:
  at::Tensor steps(const at::Tensor& dt) const;  // [T, H] of dt [T, H], in the accumulator dtype
  at::Tensor gated_norm(const at::Tensor& x, const at::Tensor& gate) const;  // [R, H P] of these sizes

  SsmSpec spec_;
  double rms_norm_eps_;
  accumulating::Projection in_, out_, conv_;  // the weight of conv_ [channels, 1, W]
  at::Tensor dt_bias_, a_log_, d_;            // [H]
  at::Tensor norm_;                           // [H P]
};

}  // namespace espalier
