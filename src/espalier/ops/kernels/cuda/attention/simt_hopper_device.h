// SPDX-License-Identifier: Apache-2.0
// The primitives of simt_hopper.h on a GPU.
#pragma once

#include <cuda.h>

#include <type_traits>

#define ESPALIER_ONE_BY_ONE _Pragma("unroll 1")

namespace espalier::simt {

using TensorMap = CUtensorMap;
TensorMap make_map(const MappedTensor& tensor);

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_phase(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra AGAIN;\n"
      "DONE:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void load_box(void* to, const TensorMap* map, uint64_t* barrier, int column,
                                         int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(column), "r"(head), "r"(token)
      : "memory");
}
__device__ __forceinline__ void load_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void add_floats(float* to_global, const float* from_shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to_global)),
               "r"(shared_address(from_shared)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap* map, const void* from, int column, int head,
                                          int token) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(shared_address(from)), "r"(column), "r"(head), "r"(token)
               : "memory");
}
__device__ __forceinline__ void commit_writes() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wait_writes_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void acquire_map(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(reinterpret_cast<uint64_t>(map))
               : "memory");
}
__device__ __forceinline__ void fence_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int N>
__device__ __forceinline__ void hold(uint32_t (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// A predicated store that never happens, since no arithmetic yields a NaN with these bits. ptxas keeps the
// order of volatile accesses and waits. (It could fold an ordered comparison.)
__device__ __forceinline__ void settle(float value) {
  asm volatile(
      "{\n.reg .pred never;\nsetp.eq.u32 never, %0, 0xffffffff;\n@never st.volatile.shared.u32 [%1], "
      "%0;\n}" ::"r"(__float_as_uint(value)),
      "r"(0)
      : "memory");
}

// clang-format off
#define ESPALIER_REGISTERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ESPALIER_REGISTERS_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
  "%59, %60, %61, %62, %63"
#define ESPALIER_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ESPALIER_D32(i) ESPALIER_D8(i), ESPALIER_D8(i + 8), ESPALIER_D8(i + 16), ESPALIER_D8(i + 24)
#define ESPALIER_OUTPUTS_64 ESPALIER_D32(0)
#define ESPALIER_OUTPUTS_128 ESPALIER_D32(0), ESPALIER_D32(32)
// clang-format on

// Arguments after the registers of D: A, B, whether to add, and which operands are Order::kKept. Operands are
// never negated (1, 1).
#define ESPALIER_MULTIPLY_DESCRIBED(N, TYPE, A, B, ADD, KEPT_A, KEPT_B)                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N     \
               "k16.f32." TYPE "." TYPE " {" ESPALIER_REGISTERS_##N "}, %" A ", %" B ", add, 1, 1, %" KEPT_A \
                                                                    ", %" KEPT_B ";\n}"                      \
               : ESPALIER_OUTPUTS_##N                                                                        \
               : "l"(a), "l"(b), "r"(int{add}), "n"(static_cast<int>(kOrderA)),                              \
                 "n"(static_cast<int>(kOrderB)))
#define ESPALIER_MULTIPLY_REGISTERS(N, TYPE, A0, A1, A2, A3, B, ADD, KEPT_B)                                \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N    \
               "k16.f32." TYPE "." TYPE " {" ESPALIER_REGISTERS_##N "}, {%" A0 ", %" A1 ", %" A2 ", %" A3   \
                                                                    "}, %" B ", add, 1, 1, %" KEPT_B ";\n}" \
               : ESPALIER_OUTPUTS_##N                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}),                         \
                 "n"(static_cast<int>(kOrderB)))

template <class Element, int N, Order kOrderA, Order kOrderB>
__device__ __forceinline__ void multiply_async(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
  static_assert(N == 64 || N == 128);
  constexpr bool kBFloat16 = std::is_same_v<Element, BFloat16>;
  if constexpr (N == 64 && kBFloat16) {
    ESPALIER_MULTIPLY_DESCRIBED(64, "bf16", "32", "33", "34", "35", "36");
  } else if constexpr (N == 64) {
    ESPALIER_MULTIPLY_DESCRIBED(64, "f16", "32", "33", "34", "35", "36");
  } else if constexpr (kBFloat16) {
    ESPALIER_MULTIPLY_DESCRIBED(128, "bf16", "64", "65", "66", "67", "68");
  } else {
    ESPALIER_MULTIPLY_DESCRIBED(128, "f16", "64", "65", "66", "67", "68");
  }
}

template <class Element, int N, Order kOrderB>
__device__ __forceinline__ void multiply_async(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                               bool add) {
  static_assert(N == 64 || N == 128);
  constexpr bool kBFloat16 = std::is_same_v<Element, BFloat16>;
  if constexpr (N == 64 && kBFloat16) {
    ESPALIER_MULTIPLY_REGISTERS(64, "bf16", "32", "33", "34", "35", "36", "37", "38");
  } else if constexpr (N == 64) {
    ESPALIER_MULTIPLY_REGISTERS(64, "f16", "32", "33", "34", "35", "36", "37", "38");
  } else if constexpr (kBFloat16) {
    ESPALIER_MULTIPLY_REGISTERS(128, "bf16", "64", "65", "66", "67", "68", "69", "70");
  } else {
    ESPALIER_MULTIPLY_REGISTERS(128, "f16", "64", "65", "66", "67", "68", "69", "70");
  }
}

#undef ESPALIER_MULTIPLY_REGISTERS
#undef ESPALIER_MULTIPLY_DESCRIBED
#undef ESPALIER_OUTPUTS_128
#undef ESPALIER_OUTPUTS_64
#undef ESPALIER_D32
#undef ESPALIER_D8
#undef ESPALIER_REGISTERS_128
#undef ESPALIER_REGISTERS_64

template <class Vector>
__device__ __forceinline__ void put(void* to_shared, const Vector& vector) {
  static_assert(sizeof(Vector) == 16);
  *static_cast<Vector*>(to_shared) = vector;
}
template <class Vector>
__device__ __forceinline__ void add_vector(float* to_global, const Vector& v) {
  static_assert(sizeof(Vector) == 16);
  asm volatile(
      "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to_global)),
      "f"(v.values[0]), "f"(v.values[1]), "f"(v.values[2]), "f"(v.values[3])
      : "memory");
}
__device__ __forceinline__ void put_matrices(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

template <int N>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace espalier::simt
