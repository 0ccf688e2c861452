// SPDX-License-Identifier: Apache-2.0
// The primitives of espalier/ops/kernels/cuda/simt.h in the emulator of a thread block (emulator.h). Included
// by that header alone.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#define ESPALIER_KERNEL inline
#define ESPALIER_UNROLL
#define ESPALIER_SHARED_CODE inline

namespace espalier::simt {

namespace emulator {

struct Place {
  int thread;
  int block[3];
  std::byte* shared;
};
/// The indices of the running thread.
const Place& place();

void sync_block();

/// Synchronises the lanes of a warp; one of them runs `work` on the 32 payloads. Fails if lanes call it with
/// different names.
void collective(const char* name, void* payload, void (*work)(void* const* payloads));

void copy_async(void* to_shared, const void* from_global, bool valid);
void commit_copies();
void wait_copies(int groups_left);

/// Fails unless the address is a multiple of `bytes`.
void check_aligned(const char* what, const void* address, int bytes);

float to_float(BFloat16 element);
float to_float(Float16 element);
uint16_t round_to_bits(float value, BFloat16);
uint16_t round_to_bits(float value, Float16);

}  // namespace emulator

inline int thread() {
  return emulator::place().thread;
}
inline int lane() {
  return thread() % 32;
}
inline int block_x() {
  return emulator::place().block[0];
}
inline int block_y() {
  return emulator::place().block[1];
}
inline int block_z() {
  return emulator::place().block[2];
}
inline std::byte* shared() {
  return emulator::place().shared;
}

inline void sync_block() {
  emulator::sync_block();
}
inline void sync_warp() {
  emulator::collective("sync_warp", nullptr, [](void* const*) {});
}
inline int warp() {
  emulator::collective("warp", nullptr, [](void* const*) {});
  return emulator::place().thread / 32;
}

template <class T>
T shuffle_xor(T value, int mask) {
  struct Payload {
    T value;
    int from;
    T result;
  } payload{value, lane() ^ mask, value};
  emulator::collective("shuffle_xor", &payload, [](void* const* all) {
    for (int l = 0; l < 32; ++l) {
      auto& own = *static_cast<Payload*>(all[l]);
      own.result = static_cast<Payload*>(all[own.from])->value;
    }
  });
  return payload.result;
}
inline uint32_t ballot(bool value) {
  struct Payload {
    bool value;
    uint32_t result;
  } payload{value, 0};
  emulator::collective("ballot", &payload, [](void* const* all) {
    uint32_t bits = 0;
    for (int l = 0; l < 32; ++l) bits |= uint32_t{static_cast<Payload*>(all[l])->value} << l;
    for (int l = 0; l < 32; ++l) static_cast<Payload*>(all[l])->result = bits;
  });
  return payload.result;
}

inline void copy_async(void* to_shared, const void* from_global, bool valid) {
  emulator::copy_async(to_shared, from_global, valid);
}
inline void commit_copies() {
  emulator::commit_copies();
}
template <int N>
void wait_copies() {
  emulator::wait_copies(N);
}
inline void add_fragment(float* fragments, const float (&d)[4]) {
  for (int i = 0; i < 4; ++i) fragments[4 * lane() + i] += d[i];
}
inline void load_fragment(const float* fragments, float (&d)[4]) {
  std::memcpy(d, fragments + 4 * lane(), sizeof(d));
}
inline Vector16 load_vector(const void* address) {
  emulator::check_aligned("load_vector", address, 16);
  Vector16 vector;
  std::memcpy(&vector, address, sizeof(vector));
  return vector;
}
inline void store_pairs(void* address, uint32_t low, uint32_t high) {
  emulator::check_aligned("store_pairs", address, 8);
  const uint32_t pairs[2] = {low, high};
  std::memcpy(address, pairs, sizeof(pairs));
}

inline int lowest_bit(uint32_t word) {
  return std::countr_zero(word);
}

inline float exp2(float x) {
  return std::exp2(x);
}
inline float log2(float x) {
  return std::log2(x);
}

template <class Element>
uint32_t pack(float low, float high) {
  return emulator::round_to_bits(low, Element{}) | uint32_t{emulator::round_to_bits(high, Element{})} << 16;
}
template <class Element>
FloatPair unpack(uint32_t pair) {
  return {emulator::to_float(Element{static_cast<uint16_t>(pair)}),
          emulator::to_float(Element{static_cast<uint16_t>(pair >> 16)})};
}

namespace emulator {

struct MatrixRead {
  const void* row;
  bool transposed;
  uint32_t result[4];
};
void read_matrices(void* const* reads);

template <class Element>
struct Product {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

// Fragments as in the PTX manual, "Matrix fragments for mma.m16n8k16": lane l holds, of A, rows l / 4 and l /
// 4 + 8 and columns 2 (l % 4) + {0, 1} and 8 more; of B the same rows as columns; of D likewise.
template <class Element>
void run_products(void* const* products) {
  float a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < 32; ++l) {
    const auto& own = *static_cast<Product<Element>*>(products[l]);
    const int row = l / 4, pair = 2 * (l % 4);
    for (int i = 0; i < 4; ++i) {
      const FloatPair values = unpack<Element>(own.a[i]);
      a[row + 8 * (i % 2)][pair + 8 * (i / 2)] = values.low;
      a[row + 8 * (i % 2)][pair + 8 * (i / 2) + 1] = values.high;
      d[row + 8 * (i / 2)][pair + i % 2] = own.d[i];
    }
    for (int i = 0; i < 2; ++i) {
      const FloatPair values = unpack<Element>(own.b[i]);
      b[pair + 8 * i][row] = values.low;
      b[pair + 8 * i + 1][row] = values.high;
    }
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int l = 0; l < 32; ++l) {
    const auto& own = *static_cast<Product<Element>*>(products[l]);
    for (int i = 0; i < 4; ++i) own.d[i] = d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
  }
}

}  // namespace emulator

inline void load_matrices(uint32_t (&r)[4], const void* row) {
  emulator::MatrixRead read{row, false, {}};
  emulator::collective("load_matrices", &read, &emulator::read_matrices);
  std::memcpy(r, read.result, sizeof(r));
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  emulator::MatrixRead read{row, true, {}};
  emulator::collective("load_matrices_transposed", &read, &emulator::read_matrices);
  std::memcpy(r, read.result, sizeof(r));
}

template <class Element>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::Product<Element> product{d, a, b};
  emulator::collective("multiply_add", &product, &emulator::run_products<Element>);
}

}  // namespace espalier::simt
