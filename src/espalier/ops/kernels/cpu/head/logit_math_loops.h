// SPDX-License-Identifier: Apache-2.0
// The loops of LogitMath, compiled for the instruction set of the including file, which defines
// ESPALIER_CPU_NAMESPACE. Must not call inline functions of headers other than isa_math.h: the linker would
// merge their copies for different instruction sets.
//   Loops run along rows; sums have kLanes partial sums, independent of the vector width. Accumulator:
//   Scalar.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/head/logit_math.h"
#include "espalier/ops/kernels/cpu/isa_math.h"

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

constexpr int64_t kLanes = 32;
// Logits per pass over maximum and exponentials, so that they stay in the L1 cache.
constexpr int64_t kChunk = 2048;

template <class Scalar>
Scalar running_maximum(const Scalar* __restrict values, int64_t count, Scalar maximum) {
  Scalar lanes[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = maximum;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];
    }
  }
  for (; i < count; ++i) maximum = values[i] > maximum ? values[i] : maximum;
  for (int64_t lane = 0; lane < kLanes; ++lane) maximum = lanes[lane] > maximum ? lanes[lane] : maximum;
  return maximum;
}

template <class Scalar>
Scalar sum_of_exps(const Scalar* __restrict values, int64_t count, Scalar maximum) {
  Scalar lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += exp_of(values[i + lane] - maximum);
  }
  for (int64_t lane = 0; i + lane < count; ++lane) lanes[lane] += exp_of(values[i + lane] - maximum);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class Scalar>
void add_exps(const Rows<const Scalar>& logits, const ExpSums<Scalar>& sums) {
  for (int64_t r = 0; r < logits.num_rows; ++r) {
    const Scalar* row = logits.data + r * logits.stride;
    Scalar maximum = sums.maximum[r], sum = sums.sum[r];
    for (int64_t begin = 0; begin < logits.width; begin += kChunk) {
      const int64_t count = logits.width - begin < kChunk ? logits.width - begin : kChunk;
      const Scalar before = maximum;
      maximum = running_maximum(row + begin, count, maximum);
      // Avoid inf - inf = NaN.
      const Scalar finite = maximum == -kInfinity<Scalar> ? Scalar(0) : maximum;
      sum = sum * exp_of(before - finite) + sum_of_exps(row + begin, count, finite);
    }
    sums.maximum[r] = maximum;
    sums.sum[r] = sum;
  }
}

template <class Scalar>
void differentiate(const Rows<Scalar>& logits, const RowGradients<Scalar>& rows) {
  for (int64_t r = 0; r < logits.num_rows; ++r) {
    Scalar* __restrict row = logits.data + r * logits.stride;
    const Scalar lse = rows.lse[r], rest = rows.lse_rest[r], factor = -rows.grad[r];
    for (int64_t w = 0; w < logits.width; ++w) row[w] = factor * exp_of((row[w] - lse) - rest);
  }
}

}  // namespace

template <class Scalar>
const LogitMath<Scalar>& logit_math() {
  static constexpr LogitMath<Scalar> kMath{&add_exps<Scalar>, &differentiate<Scalar>};
  return kMath;
}

template const LogitMath<float>& logit_math<float>();
template const LogitMath<double>& logit_math<double>();

}  // namespace espalier::ESPALIER_CPU_NAMESPACE
