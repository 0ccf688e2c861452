// SPDX-License-Identifier: Apache-2.0
// Rotary embedding and SwiGLU: the formulas of kernels/cpu/pointwise/row_math_loops.h. Every element is read
// and written once, 16 bytes at a time where addresses allow, computed in float32 (float64) and rounded once.
// No sums, no communication between threads.
//
// Rotary: a thread rotates vectors of pairs (x[i], x[i + half]); a block processes whole tokens, whose heads
// read angles from the L1 cache. Registers: two vectors of x, two of angles, upcast.
//
// SwiGLU: a thread processes two vectors of each tensor, all loaded before the first use. A remainder shorter
// than a vector is processed elementwise by the first threads.
#pragma once

#include <cmath>

#include "espalier/ops/kernels/cpu/pointwise/row_math.h"
#include "espalier/ops/kernels/cuda/vectors.cuh"

namespace espalier::cuda {

template <class Element>
struct RotationWork {
  Rotation<Element> rotation;
  int64_t num_tokens;
  int tokens_per_block;
};

template <class Element, int N>
RotationWork<Element> rotation_work(const Rotation<Element>& rotation, int64_t num_tokens) {
  const int64_t items = rotation.num_heads * (rotation.half / N);
  return {rotation, num_tokens, static_cast<int>(items >= 256 ? 1 : 256 / (items < 1 ? 1 : items))};
}

/// Any number of threads.
template <class Element, int N>
ESPALIER_KERNEL void rotate_kernel(const RotationWork<Element>& work, int num_threads) {
  using Scalar = AccumulatorOf<Element>;
  const Rotation<Element>& rotation = work.rotation;
  const int chunks = static_cast<int>(rotation.half / N);
  const int items = static_cast<int>(rotation.num_heads) * chunks;
  const int64_t half = rotation.half;
  for (int i = simt::thread(); i < work.tokens_per_block * items; i += num_threads) {
    const int64_t token = int64_t{simt::block_x()} * work.tokens_per_block + i / items;
    if (token >= work.num_tokens) return;
    const int head = i % items / chunks, at = i % chunks * N;
    const Element* x = rotation.x + token * rotation.token_stride + head * rotation.head_stride + at;
    Element* out = rotation.out + (token * rotation.num_heads + head) * 2 * half + at;
    const Vector<Element, N> low = load<N>(x), high = load<N>(x + half);
    Scalar cos[N], sin[N], a[N], b[N];
    load_scalars<N>(rotation.cos + token * half + at, cos);
    load_scalars<N>(rotation.sin + token * half + at, sin);
    upcast<Element, N>(low, a);
    upcast<Element, N>(high, b);
    for (int k = 0; k < N; ++k) {
      const Scalar s = rotation.back ? -sin[k] : sin[k], first = a[k];
      a[k] = first * cos[k] - b[k] * s;
      b[k] = b[k] * cos[k] + first * s;
    }
    store<N>(out, narrow<Element, N>(a));
    store<N>(out + half, narrow<Element, N>(b));
  }
}

/// sigmoid(x) and sigmoid(-x), both without cancellation.
template <class Scalar>
struct Logistic {
  Scalar at, at_minus;
};
template <class Scalar>
ESPALIER_KERNEL Logistic<Scalar> logistic(Scalar x) {
  const Scalar power = std::exp(x < 0 ? x : -x);
  const Scalar large = simt::reciprocal(Scalar(1) + power), small = power * large;
  return {x < 0 ? small : large, x < 0 ? large : small};
}

template <class Element>
struct SwigluWork {
  const Element* gate;
  const Element* up;
  Element* out;
  int64_t count;
};

constexpr int kPointwiseThreads = 256;
constexpr int kPointwiseVectors = 2;  // of a thread

/// Blocks of kPointwiseThreads for `count` elements; at least one, for the remainder.
template <class Element>
int64_t pointwise_blocks(int64_t count) {
  constexpr int64_t kElements = kPointwiseThreads * kPointwiseVectors * kVectorSize<Element>;
  return (count + kElements - 1) / kElements;
}

/// Calls visit(place, size constant) for this thread's vectors, all of them in bounds, and its part of the
/// remainder.
template <class Element, class Load, class Finish, class One>
ESPALIER_KERNEL void for_own_vectors(int64_t count, const Load& load_at, const Finish& finish,
                                     const One& one) {
  constexpr int N = kVectorSize<Element>;
  const int64_t vectors = count / N;
  const int64_t first = int64_t{simt::block_x()} * kPointwiseThreads * kPointwiseVectors + simt::thread();
  for (int v = 0; v < kPointwiseVectors; ++v) {
    const int64_t vector = first + v * kPointwiseThreads;
    if (vector < vectors) load_at(v, vector * N);
  }
  for (int v = 0; v < kPointwiseVectors; ++v) {
    const int64_t vector = first + v * kPointwiseThreads;
    if (vector < vectors) finish(v, vector * N);
  }
  if (simt::block_x() == 0 && simt::thread() < count % N) one(vectors * N + simt::thread());
}

template <class Element, int N>
ESPALIER_KERNEL Vector<Element, N> apply_swiglu(const Vector<Element, N>& gate,
                                                const Vector<Element, N>& up) {
  AccumulatorOf<Element> g[N], u[N];
  upcast<Element, N>(gate, g);
  upcast<Element, N>(up, u);
  for (int i = 0; i < N; ++i) g[i] = g[i] * logistic(g[i]).at * u[i];
  return narrow<Element, N>(g);
}

template <class Element>
ESPALIER_KERNEL void swiglu_kernel(const SwigluWork<Element>& work) {
  constexpr int N = kVectorSize<Element>;
  Vector<Element, N> gate[kPointwiseVectors], up[kPointwiseVectors];
  for_own_vectors<Element>(
      work.count,
      [&](int v, int64_t at) {
        gate[v] = load<N>(work.gate + at);
        up[v] = load<N>(work.up + at);
      },
      [&](int v, int64_t at) { store<N>(work.out + at, apply_swiglu<Element, N>(gate[v], up[v])); },
      [&](int64_t at) {
        store<1>(work.out + at, apply_swiglu<Element, 1>(load<1>(work.gate + at), load<1>(work.up + at)));
      });
}

template <class Element>
struct SwigluBackwardWork {
  SwigluBackward<Element> given;
  int64_t count;
};

template <class Element, int N>
struct SwigluVectors {
  Vector<Element, N> grad, gate, up;
};

template <class Element, int N>
ESPALIER_KERNEL SwigluVectors<Element, N> load_all(const SwigluBackward<Element>& given, int64_t at) {
  return {load<N>(given.grad + at), load<N>(given.gate + at), load<N>(given.up + at)};
}

template <class Element, int N>
ESPALIER_KERNEL void store_gradients(const SwigluBackward<Element>& given, int64_t at,
                                     const SwigluVectors<Element, N>& of) {
  using Scalar = AccumulatorOf<Element>;
  Scalar d[N], g[N], u[N];
  upcast<Element, N>(of.grad, d);
  upcast<Element, N>(of.gate, g);
  upcast<Element, N>(of.up, u);
  for (int i = 0; i < N; ++i) {
    const Logistic<Scalar> l = logistic(g[i]);
    const Scalar activated = g[i] * l.at;
    g[i] = d[i] * u[i] * (l.at * (Scalar(1) + g[i] * l.at_minus));
    d[i] *= activated;
  }
  store<N>(given.grad_up + at, narrow<Element, N>(d));
  store<N>(given.grad_gate + at, narrow<Element, N>(g));
}

template <class Element>
ESPALIER_KERNEL void swiglu_backward_kernel(const SwigluBackwardWork<Element>& work) {
  constexpr int N = kVectorSize<Element>;
  SwigluVectors<Element, N> held[kPointwiseVectors];
  for_own_vectors<Element>(
      work.count, [&](int v, int64_t at) { held[v] = load_all<Element, N>(work.given, at); },
      [&](int v, int64_t at) { store_gradients<Element, N>(work.given, at, held[v]); },
      [&](int64_t at) { store_gradients<Element, 1>(work.given, at, load_all<Element, 1>(work.given, at)); });
}

}  // namespace espalier::cuda
