// SPDX-License-Identifier: Apache-2.0
// The primitives of simt_hopper.h in the emulator (simt_host.h), which defines the functions in namespace
// `emulator`.
#pragma once

#define ESPALIER_ONE_BY_ONE

namespace espalier::simt {

/// The emulated tensor map of a tensor [tokens, heads, columns] of 16-bit elements.
struct TensorMap {
  const std::byte* data;
  int64_t size[3];          // columns, heads, tokens
  int64_t stride_bytes[3];  // 2, and from head to head and token to token
  int box_heads;            // of a box, which has 64 columns
  int box_tokens;
};

inline TensorMap make_map(const MappedTensor& t) {
  return {static_cast<const std::byte*>(t.data),
          {t.columns, t.heads, t.tokens},
          {2, 2 * t.head_stride, 2 * t.token_stride},
          t.box_heads,
          t.box_tokens};
}

namespace emulator {

void init_barrier(uint64_t* barrier, int arrivals);
void fence_barriers();
void arrive(uint64_t* barrier, int bytes);
void wait_phase(uint64_t* barrier, int parity);

void load_box(void* to, const TensorMap* map, uint64_t* barrier, int column, int head, int token);
void load_bytes(void* to, const void* from, int bytes, uint64_t* barrier);
void add_floats(float* to_global, const float* from_shared, int bytes);
void store_box(const TensorMap* map, const void* from, int column, int head, int token);
void commit_writes();
void wait_writes_read(int groups_left);
void acquire_map(const TensorMap* map);
void fence_copies();

/// One lane's part of a product of its warp's 16 rows.
struct AsyncProduct {
  float* d;
  const uint32_t* a_registers;  // or null
  uint64_t a;
  uint64_t b;
  int columns;
  Order order_a;
  Order order_b;
  bool add;
  float (*to_float)(uint16_t bits);
};
void fence_products();
void multiply_async(AsyncProduct product);
void commit_products();
void wait_products(int groups_left);

void put(void* to_shared, const void* vector);
void add_vector(float* to_global, const float* values);
void put_matrices(void* row, const uint32_t* r);

template <class Element>
float bits_to_float(uint16_t bits) {
  return to_float(Element{bits});
}

}  // namespace emulator

/// As on a GPU, dynamic shared memory does not start at 0.
uint32_t shared_address(const void* pointer);

inline void init_barrier(uint64_t* barrier, int arrivals) {
  emulator::init_barrier(barrier, arrivals);
}
inline void fence_barriers() {
  emulator::fence_barriers();
}
inline void arrive(uint64_t* barrier) {
  emulator::arrive(barrier, 0);
}
inline void arrive_expecting(uint64_t* barrier, int bytes) {
  emulator::arrive(barrier, bytes);
}
inline void wait_phase(uint64_t* barrier, int parity) {
  emulator::wait_phase(barrier, parity);
}

inline void load_box(void* to, const TensorMap* map, uint64_t* barrier, int column, int head, int token) {
  emulator::load_box(to, map, barrier, column, head, token);
}
inline void load_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  emulator::load_bytes(to, from, bytes, barrier);
}
inline void add_floats(float* to_global, const float* from_shared, int bytes) {
  emulator::add_floats(to_global, from_shared, bytes);
}
inline void store_box(const TensorMap* map, const void* from, int column, int head, int token) {
  emulator::store_box(map, from, column, head, token);
}
inline void commit_writes() {
  emulator::commit_writes();
}
template <int N>
void wait_writes_read() {
  emulator::wait_writes_read(N);
}
inline void acquire_map(const TensorMap* map) {
  emulator::acquire_map(map);
}
inline void fence_copies() {
  emulator::fence_copies();
}

inline void fence_products() {
  emulator::fence_products();
}
inline void commit_products() {
  emulator::commit_products();
}
template <int N>
void wait_products() {
  emulator::wait_products(N);
}
template <class T, int N>
void hold(T (&)[N]) {}
inline void settle(float) {}

template <class Element, int N, Order kOrderA, Order kOrderB>
void multiply_async(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
  emulator::multiply_async({d, nullptr, a, b, N, kOrderA, kOrderB, add, &emulator::bits_to_float<Element>});
}
template <class Element, int N, Order kOrderB>
void multiply_async(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
  emulator::multiply_async({d, a, 0, b, N, Order::kSummed, kOrderB, add, &emulator::bits_to_float<Element>});
}

template <class Vector>
void put(void* to_shared, const Vector& vector) {
  static_assert(sizeof(Vector) == 16);
  emulator::put(to_shared, &vector);
}
template <class Vector>
void add_vector(float* to_global, const Vector& vector) {
  static_assert(sizeof(Vector) == 16);
  emulator::add_vector(to_global, vector.values);
}
inline void put_matrices(void* row, const uint32_t (&r)[4]) {
  emulator::put_matrices(row, r);
}

template <int N>
void grow_registers() {}
template <int N>
void shrink_registers() {}

}  // namespace espalier::simt
