// SPDX-License-Identifier: Apache-2.0
// The elementwise operators of a decoder layer on a GPU: launches of the kernels in rms_norm.cuh and
// pointwise.cuh. Arguments are those of kernels/cpu/pointwise/row_math.h, with pointers to the memory of the
// calling thread's current device; element types double, float and BFloat16. Does not allocate or
// synchronise. Results are bitwise reproducible. Throw std::runtime_error if a launch fails.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/pointwise/row_math.h"

namespace espalier::cuda {

/// y = weight * (x / rms(x)) of the rows. Pointers are aligned to 16 bytes.
template <class Element>
void rms_norm(const RmsNormForward<Element>& norm, int64_t num_rows, void* stream);

/// The maximum width of rms_norm_backward.
template <class Element>
int64_t max_rms_norm_width();

/// The number of partial sums of the weight's gradient.
template <class Element>
int64_t rms_norm_partials(int64_t width, int64_t num_rows);

/// Pointers are aligned to 16 bytes. norm.grad_weight, if not null, is [width] and overwritten; `partials`
/// [rms_norm_partials, width] is scratch for it.
template <class Element>
void rms_norm_backward(const RmsNormBackward<Element>& norm, int64_t num_rows,
                       AccumulatorOf<Element>* partials, void* stream);

/// Any pointers and strides; uses 16-byte vectors if both are aligned.
template <class Element>
void rotate(const Rotation<Element>& rotation, int64_t num_tokens, void* stream);

/// out = gate / (1 + exp(-gate)) * up. Pointers are aligned to 16 bytes.
template <class Element>
void swiglu(const Element* gate, const Element* up, Element* out, int64_t count, void* stream);
template <class Element>
void swiglu_backward(const SwigluBackward<Element>& given, int64_t count, void* stream);

}  // namespace espalier::cuda
