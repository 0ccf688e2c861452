// SPDX-License-Identifier: Apache-2.0
// The elementwise part of edge_logprobs on the CPU, compiled once for each InstructionSet.
#pragma once

#include "espalier/ops/kernels/cpu/attention/tile_math.h"
#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

/// The running maximum and sum of exponentials of the logits of some rows.
template <class Scalar>
struct ExpSums {
  Scalar* maximum;  // of the logits so far; -infinity at first
  Scalar* sum;      // of exp(logit - maximum); 0 at first
};

/// What the gradients of a row's logits need of the row, for some rows.
template <class Scalar>
struct RowGradients {
  const Scalar* lse;       // log of the sum of exp(logit) over the vocabulary, rounded
  const Scalar* lse_rest;  // and what rounding took: its error would be a factor of the row's gradients
  const Scalar* grad;      // sum of the gradients of the row's log-probabilities
};

/// Scalar is float or double. Rows are independent of one another: bitwise identical whichever are done
/// together.
template <class Scalar>
struct LogitMath {
  /// Adds the exponentials of the logits to the sums (Milakov and Gimelshein, "Online normalizer calculation
  /// for softmax", 2018). A NaN makes the row's sum NaN; rows of -infinity alone keep maximum -infinity and
  /// sum 0.
  void (*add_exps)(const Rows<const Scalar>& logits, const ExpSums<Scalar>&);
  /// Logits become -grad * exp(logit - lse): the part of their gradients that all of the vocabulary has.
  void (*differentiate)(const Rows<Scalar>& logits, const RowGradients<Scalar>&);
};

ESPALIER_DECLARE_ISAS(template <class Scalar> const LogitMath<Scalar>& logit_math())
template <class Scalar>
const LogitMath<Scalar>& logit_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, logit_math<Scalar>());
}

}  // namespace espalier
