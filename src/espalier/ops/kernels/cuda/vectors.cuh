// SPDX-License-Identifier: Apache-2.0
// Vectors of adjacent elements, loaded and stored at once and upcast to AccumulatorOf<Element>.
#pragma once

#include <bit>

#include "espalier/ops/kernels/cuda/simt.h"

namespace espalier::cuda {

/// Elements in 16 bytes.
template <class Element>
constexpr int kVectorSize = 16 / static_cast<int>(sizeof(Element));

/// N adjacent elements: a full vector, or one.
template <class Element, int N>
struct Vector {
  static_assert(N == kVectorSize<Element>);
  simt::Vector16 bits;
};
template <class Element>
struct Vector<Element, 1> {
  Element value;
};

template <int N, class Element>
ESPALIER_KERNEL Vector<Element, N> load(const Element* address) {
  if constexpr (N == 1) {
    return {*address};
  } else {
    return {simt::load_vector(address)};
  }
}

template <int N, class Element>
ESPALIER_KERNEL void store(Element* address, const Vector<Element, N>& vector) {
  if constexpr (N == 1) {
    *address = vector.value;
  } else {
    simt::store_vector(address, vector.bits);
  }
}

ESPALIER_KERNEL double double_of(uint32_t low, uint32_t high) {
  return std::bit_cast<double>(uint64_t{high} << 32 | low);
}

template <class Element, int N>
ESPALIER_KERNEL void upcast(const Vector<Element, N>& vector, AccumulatorOf<Element> (&out)[N]) {
  if constexpr (N == 1) {
    if constexpr (sizeof(Element) == 2) {
      out[0] = simt::unpack<Element>(vector.value.bits).low;
    } else {
      out[0] = vector.value;
    }
  } else if constexpr (sizeof(Element) == 2) {
    for (int i = 0; i < 4; ++i) {
      const simt::FloatPair pair = simt::unpack<Element>(vector.bits.words[i]);
      out[2 * i] = pair.low;
      out[2 * i + 1] = pair.high;
    }
  } else if constexpr (sizeof(Element) == 4) {
    for (int i = 0; i < 4; ++i) out[i] = std::bit_cast<float>(vector.bits.words[i]);
  } else {
    for (int i = 0; i < 2; ++i) {
      out[i] = double_of(vector.bits.words[2 * i], vector.bits.words[2 * i + 1]);
    }
  }
}

/// Rounded to nearest even.
template <class Element, int N>
ESPALIER_KERNEL Vector<Element, N> narrow(const AccumulatorOf<Element> (&values)[N]) {
  Vector<Element, N> result;
  if constexpr (N == 1) {
    if constexpr (sizeof(Element) == 2) {
      result.value.bits = static_cast<uint16_t>(simt::pack<Element>(values[0], 0));
    } else {
      result.value = values[0];
    }
  } else if constexpr (sizeof(Element) == 2) {
    for (int i = 0; i < 4; ++i) {
      result.bits.words[i] = simt::pack<Element>(values[2 * i], values[2 * i + 1]);
    }
  } else if constexpr (sizeof(Element) == 4) {
    for (int i = 0; i < 4; ++i) result.bits.words[i] = std::bit_cast<uint32_t>(values[i]);
  } else {
    for (int i = 0; i < 2; ++i) {
      const auto bits = std::bit_cast<uint64_t>(values[i]);
      result.bits.words[2 * i] = static_cast<uint32_t>(bits);
      result.bits.words[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
    }
  }
  return result;
}

/// N numbers, 16 bytes at a time if possible.
template <int N, class Scalar>
ESPALIER_KERNEL void load_scalars(const Scalar* address, Scalar (&out)[N]) {
  if constexpr (N == 1) {
    out[0] = *address;
  } else {
    constexpr int kSize = kVectorSize<Scalar>;
    static_assert(N % kSize == 0);
    for (int v = 0; v < N / kSize; ++v) {
      Scalar part[kSize];
      upcast<Scalar, kSize>(load<kSize>(address + v * kSize), part);
      for (int i = 0; i < kSize; ++i) out[v * kSize + i] = part[i];
    }
  }
}

/// The sum over a team of `size` adjacent threads, a power of two, in a fixed order. A team larger than a
/// warp must be the whole block, which synchronises once; `buffer` (shared, 32 numbers) must differ from that
/// of the previous call.
template <class Scalar>
ESPALIER_KERNEL Scalar team_sum(Scalar value, int size, Scalar* buffer) {
  for (int distance = (size < 32 ? size : 32) / 2; distance > 0; distance /= 2) {
    value += simt::shuffle_xor(value, distance);
  }
  if (size <= 32) return value;
  if (simt::lane() == 0) buffer[simt::thread() / 32] = value;
  simt::sync_block();
  Scalar sum = 0;
  for (int warp = 0; warp < size / 32; ++warp) sum += buffer[warp];
  return sum;
}

}  // namespace espalier::cuda
