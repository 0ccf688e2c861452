// SPDX-License-Identifier: Apache-2.0
// The primitives of simt.h on a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define ESPALIER_KERNEL __device__ __forceinline__
#define ESPALIER_UNROLL _Pragma("unroll")
#define ESPALIER_SHARED_CODE __host__ __device__ __forceinline__

namespace espalier::simt {

__device__ __forceinline__ int thread() {
  return static_cast<int>(threadIdx.x);
}
__device__ __forceinline__ int lane() {
  return thread() % 32;
}
__device__ __forceinline__ int warp() {
  // Uniform over the warp: the shuffle lets the compiler use uniform registers.
  return __shfl_sync(0xffffffff, thread() / 32, 0);
}
__device__ __forceinline__ int block_x() {
  return static_cast<int>(blockIdx.x);
}
__device__ __forceinline__ int block_y() {
  return static_cast<int>(blockIdx.y);
}
__device__ __forceinline__ int block_z() {
  return static_cast<int>(blockIdx.z);
}
__device__ __forceinline__ std::byte* shared() {
  extern __shared__ __align__(1024) unsigned char espalier_shared[];
  return reinterpret_cast<std::byte*>(espalier_shared);
}

__device__ __forceinline__ void sync_block() {
  __syncthreads();
}
__device__ __forceinline__ void sync_warp() {
  __syncwarp();
}

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffff, value, mask);
}
__device__ __forceinline__ uint32_t ballot(bool value) {
  return __ballot_sync(0xffffffff, value);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
               "l"(from_global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void add_fragment(float* fragments, const float (&d)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(fragments + 4 * lane()),
               "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) atomicAdd(fragments + 32 * i + lane(), d[i]);
#endif
}
__device__ __forceinline__ void load_fragment(const float* fragments, float (&d)[4]) {
#if __CUDA_ARCH__ >= 900
  const float4 all = *reinterpret_cast<const float4*>(fragments + 4 * lane());
  d[0] = all.x;
  d[1] = all.y;
  d[2] = all.z;
  d[3] = all.w;
#else
  for (int i = 0; i < 4; ++i) d[i] = fragments[32 * i + lane()];
#endif
}
__device__ __forceinline__ Vector16 load_vector(const void* address) {
  const uint4 v = *static_cast<const uint4*>(address);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void store_pairs(void* address, uint32_t low, uint32_t high) {
  *static_cast<uint2*>(address) = make_uint2(low, high);
}

__device__ __forceinline__ int lowest_bit(uint32_t word) {
  return __ffs(static_cast<int>(word)) - 1;
}

__device__ __forceinline__ float exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;  // PTX operands: upper half first
  if constexpr (std::is_same_v<Element, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <class Element>
__device__ __forceinline__ FloatPair unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
    return {both.x, both.y};
  }
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

template <class Element>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace espalier::simt
