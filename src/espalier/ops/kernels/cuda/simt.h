// SPDX-License-Identifier: Apache-2.0
// Primitives that kernels are written in: threads, shared memory and tensor cores of a GPU, with two
// implementations. nvcc uses simt_device.h, which maps to CUDA. Other compilers include ESPALIER_SIMT_HEADER,
// which tests define: a kernel then runs in an emulator, thread by thread
// (tests/ops/kernels/cuda/emulator.h), and the same source, with its tiles, indices and synchronisation, is
// tested without a GPU.
//
// A kernel is a function template `ESPALIER_KERNEL void name(const Params&)`. A .cu file wraps it in a
// __global__ function; a test passes it to the emulator. It may use the primitives below and plain C++, but
// no CUDA built-ins, __shared__ variables or recursion. Functions are ESPALIER_KERNEL, or
// ESPALIER_SHARED_CODE if the host calls them too; ESPALIER_UNROLL marks loops whose indices must be
// compile-time constants, so that arrays stay in registers.
//
// Place (namespace espalier::simt)
//   thread(), lane()             int, in the block, which has one dimension, and in the warp
//   warp()                       int; asked by whole warps, as a collective
//   block_x(), block_y(), block_z()
//   shared()                     dynamic shared memory of the block, at a multiple of 1,024; holds anything
//
// Order
//   sync_block()                 all threads of the block
//   sync_warp()                  the 32 lanes of a warp, which must all call it, as in all collectives below
//
// Between lanes (values of 4 or 8 bytes)
//   shuffle_xor(value, mask), ballot(bool)
//
// Memory
//   copy_async(to_shared, from_global, valid)
//                                16 bytes, both aligned to them; zeros where not valid, and then the source
//                                is not read. There after a wait; for other threads, after a barrier after
//                                that.
//   commit_copies()              ends a group of copies of this thread
//   wait_copies<N>()             until all but its last N groups are there
//   add_fragment(fragments, d)   adds four floats of each lane, atomically, to 128 in global memory (at a
//                                multiple of 16 bytes) in the order that is fastest; load_fragment reads them
//   load_vector(address)         16 bytes at once, aligned to them
//   store_pairs(address, low, high)
//                                two uint32_t at once, aligned to 8 bytes
//
// Bits
//   lowest_bit(word)             the number of the lowest bit that is set, of at least one
//
// Arithmetic
//   exp2(x), log2(x)             float, to about 2 units in the last place; exp2(-infinity) = 0
//   pack<Element>(low, high)     two floats, rounded to nearest even, as the halves of a uint32_t
//   unpack<Element>(pair)        and back
//
// Tensor cores (Element: BFloat16 or Float16; layouts as in the PTX manual, "Warp-level matrix instructions")
//   load_matrices(r, row)        ldmatrix .x4: lane l names row l % 8 (16 bytes of shared memory) of matrix
//                                l / 8; r[m] holds elements (lane / 4, 2 (lane % 4) + {0, 1}) of matrix m
//   load_matrices_transposed(r, row)
//                                the same of their transposes
//   multiply_add<Element>(d, a, b)
//                                D += A B: A [16, 16] in a[4], B [16, 8] in b[2], D [16, 8] in d[4], summed
//                                in float32
#pragma once

#include <cstddef>
#include <cstdint>

#include "espalier/ops/kernels/element.h"

namespace espalier::simt {

/// 16 bytes that are read or written at once.
struct alignas(16) Vector16 {
  uint32_t words[4];
};

/// The result of unpack.
struct FloatPair {
  float low, high;
};

}  // namespace espalier::simt

#ifdef __CUDACC__
#include "espalier/ops/kernels/cuda/simt_device.h"
#elif defined(ESPALIER_SIMT_HEADER)
#include ESPALIER_SIMT_HEADER
#else
#error "kernels are compiled by nvcc, or in the emulator of the tests"
#endif

namespace espalier::simt {

constexpr int kWarpSize = 32;

}  // namespace espalier::simt
