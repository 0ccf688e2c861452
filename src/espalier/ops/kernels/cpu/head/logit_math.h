// SPDX-License-Identifier: Apache-2.0
// The elementwise part of edge_logprobs on the CPU, compiled once per InstructionSet.
#pragma once

#include "espalier/ops/kernels/cpu/attention/tile_math.h"
#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

/// The running maximum and sum of exponentials of rows of logits.
template <class Scalar>
struct ExpSums {
  Scalar* maximum;  // running maximum; initially -infinity
  Scalar* sum;      // of exp(logit - maximum); initially 0
};

/// Per-row inputs of the gradients of logits.
template <class Scalar>
struct RowGradients {
  const Scalar* lse;       // log of the sum of exp(logit) over the vocabulary, rounded
  const Scalar* lse_rest;  // remainder of the rounding, whose error would scale the gradients
  const Scalar* grad;      // sum of the gradients of the row's log-probabilities
};

/// Scalar is float or double. Rows are independent: results do not depend on how they are grouped.
template <class Scalar>
struct LogitMath {
  /// Adds the exponentials of the logits to the sums (Milakov and Gimelshein, "Online normalizer calculation
  /// for softmax", 2018). NaN propagates to the sum; rows of only -infinity keep maximum -infinity and sum 0.
  void (*add_exps)(const Rows<const Scalar>& logits, const ExpSums<Scalar>&);
  /// Logits become -grad * exp(logit - lse): the part of the gradients common to all entries.
  void (*differentiate)(const Rows<Scalar>& logits, const RowGradients<Scalar>&);
};

ESPALIER_DECLARE_ISAS(template <class Scalar> const LogitMath<Scalar>& logit_math())
template <class Scalar>
const LogitMath<Scalar>& logit_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, logit_math<Scalar>());
}

}  // namespace espalier
