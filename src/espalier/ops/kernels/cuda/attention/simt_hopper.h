// SPDX-License-Identifier: Apache-2.0
// Primitives for kernels (simt.h) that require Hopper GPUs, compute capability 9.0a. PTX instructions are in
// brackets; see the sections "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions",
// "mbarrier" and "Data Movement and Conversion Instructions: Asynchronous copy" of the PTX manual.
//
// Tiles. Asynchronous products and box copies use the same layout of 16-bit matrices in shared memory, called
// slabs here: columns in slabs of 64, each row-major with 128 bytes per row, and bits 4 to 6 of every address
// XORed with bits 7 to 9 ("128B swizzle"). Slabs are aligned to 1,024 bytes.
//
// Barriers that count arrivals and bytes (8 bytes of shared memory each) [mbarrier]
//   init_barrier(barrier, arrivals)   by one thread, followed by fence_barriers() and sync_block() by all
//   arrive(barrier)
//   arrive_expecting(barrier, bytes)  arrives, and adds to the bytes that the phase waits for
//   wait_phase(barrier, parity)       until the phase of this parity has ended: the first phase has parity 0,
//                                     and the one before it, of parity 1, has ended
// Copies by the copy engine (TMA), issued by one thread
//   load_box(to, map, barrier, column, head, token)
//                                     the map's box at this position, as a slab whose rows are the tokens
//                                     of the box, and for each its heads; zeros outside of the tensor.
//                                     Counts the bytes of the whole box at the barrier.
//   load_bytes(to, from, bytes, barrier)
//                                     both aligned to 16 bytes [cp.async.bulk]
//   add_floats(to_global, from_shared, bytes)
//                                     adds atomically, likewise aligned [cp.reduce.async.bulk]
//   store_box(map, from, column, head, token)
//                                     the reverse of load_box; elements outside of the tensor are not
//                                     written [cp.async.bulk.tensor]
//   commit_writes(), wait_writes_read<N>()
//                                     ends a group of this thread's adds and stores; waits until all but
//                                     the last N groups have read their shared memory
//   make_map(tensor)                  on the host, creates the map of boxes; throws std::runtime_error if
//                                     the copy engine does not support it
//   acquire_map(map)                  before the first use, by this thread, of a map in global memory that
//                                     the host has written [fence.proxy.tensormap]
//   fence_copies()                    makes this thread's writes to shared memory visible to asynchronous
//                                     products and copies; a barrier must follow [fence.proxy.async]
// Products by a warpgroup, four warps of which the first has a number divisible by 4 [wgmma]
//   fence_products()                  before every group, after the last change of the registers it uses
//   multiply_async<Element, N, A, B>(d, a, b, add)
//                                     D = A B, or D += A B if `add`: A [64, 16], B [16, N]; b, and a unless
//                                     it is a[4] in registers, are descriptors; Order is the index along
//                                     which rows of a matrix run in memory
//   commit_products(), wait_products<N>()
//                                     waits until all but the last N groups are done. Before that, neither
//                                     d nor registers of A nor the shared memory of a and b may be accessed.
//   hold(registers)                   keeps the compiler from moving uses of an array across this point
//   settle(value)                     forces a value to be computed here instead of after the next wait,
//                                     where ptxas would move the arithmetic
//   Lane l of warp w of the four has in d[i] row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) +
//   2 (l % 4) + i % 2 of D; and in a[4] the elements of multiply_add in simt.h for rows [16 w, 16 w + 16).
// Other
//   put(to_shared, vector)            writes 16 bytes that asynchronous copies or products will read
//   add_vector(to_global, vector)     adds four floats, each atomically; `to_global` is aligned to 16 bytes
//                                     [red.global.add.v4.f32]
//   put_matrices(row, r)              [stmatrix] .x4: the reverse of load_matrices
//   grow_registers<N>(), shrink_registers<N>()
//                                     sets the registers of the warpgroup's threads to N [setmaxnreg]
#pragma once

#include "espalier/ops/kernels/cuda/simt.h"

namespace espalier::simt {

/// The index along which the 128-byte rows of an operand run: the summed one (kSummed: A row-major, B
/// column-major) or the other one (kKept).
enum class Order { kSummed = 0, kKept = 1 };

/// A tensor [tokens, heads, columns] of 16-bit elements in global memory, adjacent in a row, and the boxes
/// that are to be loaded from it: 64 columns of so many heads and tokens, each 256 at most.
struct MappedTensor {
  const void* data;      // aligned to 16 bytes
  int64_t token_stride;  // in elements, multiples of 8
  int64_t head_stride;
  int32_t columns;
  int32_t heads;
  int32_t tokens;
  int32_t box_heads;
  int32_t box_tokens;
};

constexpr int kSlabColumns = 64;
constexpr int kSlabRowBytes = 128;
constexpr int kWarpgroupSize = 128;

}  // namespace espalier::simt

#ifdef __CUDACC__
#include "espalier/ops/kernels/cuda/attention/simt_hopper_device.h"
#else
#include "espalier/ops/kernels/cuda/attention/simt_hopper_host.h"
#endif

namespace espalier::simt {

/// Offset of the 16 bytes of columns [8 c, 8 c + 8) of a row of a slab.
ESPALIER_SHARED_CODE int slab_offset(int row, int c) {
  return row * kSlabRowBytes + ((c ^ (row & 7)) << 4);
}

// Descriptors ("Matrix descriptor format"): bits 0-13 start, 16-29 leading, 32-45 stride offset, all divided
// by 16; bits 62-63 = 1: 128B swizzle. From 8 rows to the next 8 is the stride offset. The leading offset,
// from slab to slab, counts for Order::kKept alone; for Order::kSummed the manual has it "assumed 1".
ESPALIER_SHARED_CODE uint64_t slab_descriptor(uint32_t shared_address, int leading_bytes) {
  constexpr uint64_t kSwizzle = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kSlabRowBytes / 16} << 32;
  return kSwizzle | kEightRows | uint64_t{static_cast<uint32_t>(leading_bytes) / 16} << 16 |
         (shared_address & 0x3ffff) >> 4;
}

/// A matrix in slabs of kRows rows as an operand of products.
template <int kRows>
struct Slabs {
  static constexpr int kBytes = kRows * kSlabRowBytes;  // of one slab
  static_assert(kRows % 8 == 0);

  uint32_t address;

  ESPALIER_KERNEL explicit Slabs(const void* begin) : address(shared_address(begin)) {}

  /// Rows from `row` (a multiple of 8), of which columns [column, column + 16) are summed over.
  ESPALIER_SHARED_CODE uint64_t summed_columns(int row, int column) const {
    return slab_descriptor(address, 16) +
           (column / kSlabColumns * kBytes + row * kSlabRowBytes + column % kSlabColumns * 2) / 16;
  }
  /// Columns from `column` (a multiple of 64), of which rows [row, row + 16) are summed over.
  ESPALIER_SHARED_CODE uint64_t summed_rows(int row, int column) const {
    return slab_descriptor(address, kBytes) + (column / kSlabColumns * kBytes + row * kSlabRowBytes) / 16;
  }
};

}  // namespace espalier::simt
