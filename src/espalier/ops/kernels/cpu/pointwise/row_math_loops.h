// SPDX-License-Identifier: Apache-2.0
// The loops of RowMath, compiled for the instruction set of the including file, which defines
// ESPALIER_CPU_NAMESPACE. Must not call inline functions of headers other than isa_math.h: the linker would
// merge their copies for different instruction sets. Formulas: docs/math.md, "Elementwise parts".
#pragma once

#include "espalier/ops/kernels/cpu/isa_math.h"
#include "espalier/ops/kernels/cpu/pointwise/row_math.h"

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

// Partial sums per row, independent of the vector width: improves accuracy and hides the latency of
// additions.
constexpr int64_t kLanes = 64;

// The sum of term(i) for i in [0, count).
template <class Scalar, class Term>
inline Scalar sum_of(int64_t count, const Term& term) {
  Scalar lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int64_t lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class Element>
void rms_norm(const RmsNormForward<Element>& norm, int64_t begin, int64_t end) {
  using Scalar = AccumulatorOf<Element>;
  const int64_t width = norm.width;
  const Element* __restrict weight = norm.weight;
  for (int64_t row = begin; row < end; ++row) {
    const Element* __restrict x = norm.x + row * width;
    if (norm.addend != nullptr) {
      const Element* __restrict addend = norm.addend + row * width;
      Element* __restrict sum = norm.sum + row * width;
      for (int64_t i = 0; i < width; ++i) sum[i] = narrowed<Element>(upcast(x[i]) + upcast(addend[i]));
      x = sum;
    }
    const Scalar squares = sum_of<Scalar>(width, [x](int64_t i) { return upcast(x[i]) * upcast(x[i]); });
    const Scalar mean = squares / static_cast<Scalar>(width) + static_cast<Scalar>(norm.eps);
    const Scalar inverse = Scalar(1) / static_cast<Scalar>(__builtin_sqrt(mean));
    norm.inverse_rms[row] = inverse;
    Element* __restrict y = norm.y + row * width;
    for (int64_t i = 0; i < width; ++i) {
      const Scalar normalised = upcast(narrowed<Element>(upcast(x[i]) * inverse));
      y[i] = narrowed<Element>(normalised * upcast(weight[i]));
    }
  }
}

// With n = x / rms(x): grad_x = (g w - n mean(g w n)) / rms(x).
template <class Element>
void grad_row(const RmsNormBackward<Element>& norm, int64_t row) {
  using Scalar = AccumulatorOf<Element>;
  const int64_t width = norm.width;
  const Element* __restrict weight = norm.weight;
  const Element* __restrict x = norm.x + row * width;
  const Element* __restrict grad = norm.grad_y + row * width;
  const Scalar inverse = norm.inverse_rms[row];
  const Scalar product = sum_of<Scalar>(
      width, [=](int64_t i) { return upcast(grad[i]) * upcast(weight[i]) * (upcast(x[i]) * inverse); });
  const Scalar mean = product / static_cast<Scalar>(width);
  Element* __restrict out = norm.grad_x + row * width;
  const auto grad_x = [=](int64_t i) {
    return (upcast(grad[i]) * upcast(weight[i]) - upcast(x[i]) * inverse * mean) * inverse;
  };
  if (norm.grad_sum == nullptr) {
    for (int64_t i = 0; i < width; ++i) out[i] = narrowed<Element>(grad_x(i));
  } else {
    const Element* __restrict grad_sum = norm.grad_sum + row * width;
    for (int64_t i = 0; i < width; ++i) out[i] = narrowed<Element>(grad_x(i) + upcast(grad_sum[i]));
  }
}

template <class Element>
void rms_norm_backward(const RmsNormBackward<Element>& norm, int64_t begin, int64_t end) {
  using Scalar = AccumulatorOf<Element>;
  for (int64_t row = begin; row < end; ++row) {
    if (norm.grad_x != nullptr) grad_row(norm, row);
    if (norm.grad_weight == nullptr) continue;
    const Element* __restrict x = norm.x + row * norm.width;
    const Element* __restrict grad = norm.grad_y + row * norm.width;
    Scalar* __restrict sum = norm.grad_weight;
    const Scalar inverse = norm.inverse_rms[row];
    for (int64_t i = 0; i < norm.width; ++i) sum[i] += upcast(grad[i]) * (upcast(x[i]) * inverse);
  }
}

template <class Element>
void rotate(const Rotation<Element>& rotation, int64_t begin, int64_t end) {
  using Scalar = AccumulatorOf<Element>;
  const int64_t half = rotation.half;
  const Scalar direction = rotation.back ? Scalar(-1) : Scalar(1);
  for (int64_t token = begin; token < end; ++token) {
    const Scalar* __restrict cos = rotation.cos + token * half;
    const Scalar* __restrict sin = rotation.sin + token * half;
    for (int64_t head = 0; head < rotation.num_heads; ++head) {
      const Element* __restrict x = rotation.x + token * rotation.token_stride + head * rotation.head_stride;
      Element* __restrict out = rotation.out + (token * rotation.num_heads + head) * 2 * half;
      for (int64_t i = 0; i < half; ++i) {
        const Scalar a = upcast(x[i]), b = upcast(x[i + half]), c = cos[i], s = direction * sin[i];
        out[i] = narrowed<Element>(a * c - b * s);
        out[i + half] = narrowed<Element>(b * c + a * s);
      }
    }
  }
}

// sigmoid(x) and sigmoid(-x), both without cancellation.
template <class Scalar>
struct Logistic {
  Scalar at, at_minus;
};

template <class Scalar>
inline Logistic<Scalar> logistic(Scalar x) {
  const Scalar power = exp_of(x < 0 ? x : -x);
  const Scalar large = Scalar(1) / (Scalar(1) + power), small = power * large;
  return {x < 0 ? small : large, x < 0 ? large : small};
}

template <class Element>
void swiglu(const Element* __restrict gate, const Element* __restrict up, Element* __restrict out,
            int64_t begin, int64_t end) {
  using Scalar = AccumulatorOf<Element>;
  for (int64_t i = begin; i < end; ++i) {
    const Scalar g = upcast(gate[i]);
    out[i] = narrowed<Element>(g * logistic(g).at * upcast(up[i]));
  }
}

template <class Element>
void swiglu_backward(const SwigluBackward<Element>& given, int64_t begin, int64_t end) {
  using Scalar = AccumulatorOf<Element>;
  const Element* __restrict grad = given.grad;
  const Element* __restrict gate = given.gate;
  const Element* __restrict up = given.up;
  Element* __restrict grad_gate = given.grad_gate;
  Element* __restrict grad_up = given.grad_up;
  for (int64_t i = begin; i < end; ++i) {
    const Scalar d = upcast(grad[i]), g = upcast(gate[i]), u = upcast(up[i]);
    const Logistic<Scalar> l = logistic(g);
    grad_up[i] = narrowed<Element>(d * (g * l.at));
    grad_gate[i] = narrowed<Element>(d * u * (l.at * (Scalar(1) + g * l.at_minus)));
  }
}

}  // namespace

template <class Element>
const RowMath<Element>& row_math() {
  static constexpr RowMath<Element> kMath{&rms_norm<Element>, &rms_norm_backward<Element>, &rotate<Element>,
                                          &swiglu<Element>, &swiglu_backward<Element>};
  return kMath;
}

template const RowMath<double>& row_math<double>();
template const RowMath<float>& row_math<float>();
template const RowMath<BFloat16>& row_math<BFloat16>();

}  // namespace espalier::ESPALIER_CPU_NAMESPACE
