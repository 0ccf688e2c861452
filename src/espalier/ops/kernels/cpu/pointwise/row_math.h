// SPDX-License-Identifier: Apache-2.0
// The elementwise operators of a decoder layer on the CPU, row by row, compiled once per InstructionSet.
// Elements are read once, upcast to AccumulatorOf<Element>, and rounded when written. Rows are independent.
// Output pointers must not overlap others.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/isa_dispatch.h"
#include "espalier/ops/kernels/element.h"

namespace espalier {

/// Adjacent rows of `width` elements.
template <class Element>
struct RmsNormForward {
  int64_t width;
  double eps;
  const Element* weight;  // [width]
  const Element* x;
  const Element* addend;  // added to x; null: none
  Element* sum;           // x + addend, if there is one
  Element* y;
  AccumulatorOf<Element>* inverse_rms;  // one per row
};

template <class Element>
struct RmsNormBackward {
  int64_t width;
  const Element* weight;
  const Element* x;  // the normalised tensor: with an addend, the sum
  const AccumulatorOf<Element>* inverse_rms;
  const Element* grad_y;
  const Element* grad_sum;              // added to grad_x; null: none
  Element* grad_x;                      // may be null
  AccumulatorOf<Element>* grad_weight;  // [width], added to; may be null
};

/// Rows [tokens, heads, 2 half].
template <class Element>
struct Rotation {
  int64_t num_heads;
  int64_t half;
  const Element* x;
  int64_t token_stride;
  int64_t head_stride;
  const AccumulatorOf<Element>* cos;  // [tokens, half]
  const AccumulatorOf<Element>* sin;
  bool back;
  Element* out;  // adjacent rows
};

template <class Element>
struct SwigluBackward {
  const Element* grad;
  const Element* gate;
  const Element* up;
  Element* grad_gate;
  Element* grad_up;
};

/// All functions process [begin, end) of rows, tokens or elements.
template <class Element>
struct RowMath {
  /// y = weight * (x / rms(x)), the bracket rounded to Element before the product.
  void (*rms_norm)(const RmsNormForward<Element>&, int64_t begin, int64_t end);
  void (*rms_norm_backward)(const RmsNormBackward<Element>&, int64_t begin, int64_t end);
  /// (a, b) = (x[i], x[i + half]) -> (a cos - b sin, b cos + a sin); back: by the negative angle.
  void (*rotate)(const Rotation<Element>&, int64_t begin, int64_t end);
  /// out = gate / (1 + exp(-gate)) * up.
  void (*swiglu)(const Element* gate, const Element* up, Element* out, int64_t begin, int64_t end);
  void (*swiglu_backward)(const SwigluBackward<Element>&, int64_t begin, int64_t end);
};

ESPALIER_DECLARE_ISAS(template <class Element> const RowMath<Element>& row_math())
template <class Element>
const RowMath<Element>& row_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, row_math<Element>());
}

/// sum[i] += partials[b, i] over all b, in order; partials [num_partials, width], sum [width].
template <class Scalar>
void add_partials(const Scalar* partials, int64_t num_partials, int64_t width, double* sum);

}  // namespace espalier
