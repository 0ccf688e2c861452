// SPDX-License-Identifier: Apache-2.0
// Small kernels, each of a few words of simt_hopper.h, that tests run in the emulator and on a GPU.
#pragma once

#include "espalier/ops/kernels/cuda/attention/simt_hopper.h"

namespace espalier::testing {

using simt::Order;

struct alignas(16) FourFloats {
  float values[4];
};

/// Row and column of a thread's sum i of a product of 64 or 128 rows.
ESPALIER_SHARED_CODE int sum_row(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2);
}
ESPALIER_SHARED_CODE int sum_column(int thread, int i) {
  return 8 * (i / 4) + 2 * (thread % 4) + i % 2;
}

/// Makes `count` barriers of one arrival each, by all threads of a block.
ESPALIER_KERNEL void make_barriers(uint64_t* barriers, int count) {
  if (simt::thread() == 0) {
    for (int i = 0; i < count; ++i) simt::init_barrier(barriers + i, 1);
    simt::fence_barriers();
  }
  simt::sync_block();
}

/// D [128, N] = A B by two warpgroups, each of which has 64 rows of A, from shared memory or registers.
template <class ElementType, int kN, Order kA, Order kB, bool kRegisters>
struct ProductKernel {
  using Element = ElementType;
  static constexpr int kColumns = kN;
  static constexpr Order kOrderA = kA, kOrderB = kB;
  static constexpr int kSummed = 128;
  // As they lie in memory.
  static constexpr int kRowsA = kA == Order::kSummed ? 128 : kSummed;
  static constexpr int kRowsB = kB == Order::kSummed ? kN : kSummed;
  static constexpr int kColumnsA = 128 * kSummed / kRowsA;
  static constexpr int kColumnsB = kN * kSummed / kRowsB;
  static constexpr int kBytesA = 128 * kSummed * 2, kBytesB = kN * kSummed * 2;
  static constexpr int kSharedBytes = kBytesA + kBytesB + 8;
  static constexpr int kThreads = 256;

  struct Params {
    simt::TensorMap map_a;  // boxes of all rows
    simt::TensorMap map_b;
    const Element* a;
    float* d;
  };

  static ESPALIER_KERNEL void run(const Params& params) {
    std::byte* shared = simt::shared();
    auto* barrier = reinterpret_cast<uint64_t*>(shared + kBytesA + kBytesB);
    make_barriers(barrier, 1);
    if (simt::thread() == 0) {
      simt::arrive_expecting(barrier, kBytesA + kBytesB);
      for (int c = 0; c < kColumnsA; c += simt::kSlabColumns)
        simt::load_box(shared + kRowsA * 2 * c, &params.map_a, barrier, c, 0, 0);
      for (int c = 0; c < kColumnsB; c += simt::kSlabColumns)
        simt::load_box(shared + kBytesA + kRowsB * 2 * c, &params.map_b, barrier, c, 0, 0);
    }
    simt::wait_phase(barrier, 0);
    const int group = simt::thread() / simt::kWarpgroupSize;
    const simt::Slabs<kRowsA> a(shared);
    const simt::Slabs<kRowsB> b(shared + kBytesA);
    float sums[kN / 2];
    uint32_t registers[kSummed / 16][4];
    if (kRegisters) load_registers(params, registers);
    simt::fence_products();
    ESPALIER_UNROLL
    for (int k = 0; k < kSummed; k += 16) {
      const uint64_t in_b = kB == Order::kSummed ? b.summed_columns(0, k) : b.summed_rows(k, 0);
      const uint64_t in_a =
          kA == Order::kSummed ? a.summed_columns(64 * group, k) : a.summed_rows(k, 64 * group);
      if constexpr (kRegisters) {
        simt::multiply_async<Element, kN, kB>(sums, registers[k / 16], in_b, k > 0);
      } else {
        simt::multiply_async<Element, kN, kA, kB>(sums, in_a, in_b, k > 0);
      }
    }
    simt::commit_products();
    simt::wait_products<0>();
    simt::hold(sums);
    ESPALIER_UNROLL
    for (int i = 0; i < kN / 2; ++i)
      params.d[sum_row(simt::thread(), i) * kN + sum_column(simt::thread(), i)] = sums[i];
  }

 private:
  static ESPALIER_KERNEL void load_registers(const Params& params, uint32_t (&registers)[kSummed / 16][4]) {
    ESPALIER_UNROLL
    for (int k = 0; k < kSummed; k += 16) {
      ESPALIER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = sum_row(simt::thread(), 2 * i), column = k + 8 * (i / 2) + 2 * (simt::thread() % 4);
        const Element* from = params.a + row * kSummed + column;
        registers[k / 16][i] = from[0].bits | uint32_t{from[1].bits} << 16;
      }
    }
  }
};

/// A box as the copy engine leaves it, put back into rows of 64 columns.
struct BoxKernel {
  struct Params {
    simt::TensorMap map;
    int column, head, token;
    int rows;
    uint16_t* out;
  };
  static constexpr int kThreads = 32;
  static constexpr int shared_bytes(int rows) { return rows * simt::kSlabRowBytes + 8; }

  static ESPALIER_KERNEL void run(const Params& params) {
    std::byte* shared = simt::shared();
    auto* barrier = reinterpret_cast<uint64_t*>(shared + params.rows * simt::kSlabRowBytes);
    make_barriers(barrier, 1);
    if (simt::thread() == 0) {
      simt::arrive_expecting(barrier, params.rows * simt::kSlabRowBytes);
      simt::load_box(shared, &params.map, barrier, params.column, params.head, params.token);
    }
    simt::wait_phase(barrier, 0);
    for (int i = simt::thread(); i < params.rows * simt::kSlabColumns; i += kThreads) {
      const int row = i / simt::kSlabColumns, column = i % simt::kSlabColumns;
      const std::byte* chunk = shared + simt::slab_offset(row, column / 8);
      params.out[i] = reinterpret_cast<const uint16_t*>(chunk)[column % 8];
    }
  }
};

/// A box of rows whose element (row, column) is 64 row + column as bits, written by threads and stored.
struct StoreKernel {
  struct Params {
    simt::TensorMap map;
    int column, head, token;
    int rows;
    bool fence, wait;
  };
  static constexpr int kThreads = 32;
  static constexpr int shared_bytes(int rows) { return rows * simt::kSlabRowBytes; }

  static ESPALIER_KERNEL void run(const Params& params) {
    for (int i = simt::thread(); i < params.rows * 8; i += kThreads) {
      const int row = i / 8, chunk = i % 8;
      simt::Vector16 vector;
      for (int w = 0; w < 4; ++w) {
        const uint32_t first = 64 * row + 8 * chunk + 2 * w;
        vector.words[w] = first | (first + 1) << 16;
      }
      simt::put(simt::shared() + simt::slab_offset(row, chunk), vector);
    }
    if (params.fence) simt::fence_copies();
    simt::sync_block();
    if (simt::thread() != 0) return;
    simt::store_box(&params.map, simt::shared(), params.column, params.head, params.token);
    simt::commit_writes();
    if (params.wait) simt::wait_writes_read<0>();
  }
};

/// A tile that the threads themselves write by put_matrices, multiplied by itself: D [64, 64] = A A^T, where
/// 8 x 8 elements of A at a time are 8 (row / 8) + column / 8.
struct WrittenTileKernel {
  struct Params {
    bool fence;
    float* d;
  };
  static constexpr int kThreads = 128;
  static constexpr int kSharedBytes = 64 * simt::kSlabRowBytes;

  static ESPALIER_KERNEL void run(const Params& params) {
    const int warp = simt::thread() / 32, lane = simt::lane();
    for (int s = 0; s < 4; ++s) {
      uint32_t r[4];
      ESPALIER_UNROLL
      for (int m = 0; m < 4; ++m) {
        const auto value = static_cast<float>(8 * (2 * warp + m % 2) + 2 * s + m / 2);
        r[m] = simt::pack<BFloat16>(value, value);
      }
      simt::put_matrices(simt::shared() + simt::slab_offset(16 * warp + lane % 16, 2 * s + lane / 16), r);
    }
    if (params.fence) simt::fence_copies();
    simt::sync_block();
    const simt::Slabs<64> tile(simt::shared());
    float sums[32];
    simt::fence_products();
    ESPALIER_UNROLL
    for (int k = 0; k < 64; k += 16) {
      simt::multiply_async<BFloat16, 64, Order::kSummed, Order::kSummed>(sums, tile.summed_columns(0, k),
                                                                         tile.summed_columns(0, k), k > 0);
    }
    simt::commit_products();
    simt::wait_products<0>();
    simt::hold(sums);
    ESPALIER_UNROLL
    for (int i = 0; i < 32; ++i)
      params.d[sum_row(simt::thread(), i) * 64 + sum_column(simt::thread(), i)] = sums[i];
  }

  static float expected(int row, int column) {
    float sum = 0;
    for (int c = 0; c < 8; ++c) sum += 8.0F * static_cast<float>((row / 8 * 8 + c) * (column / 8 * 8 + c));
    return sum;
  }
};

/// Loads 256 floats, adds its place to each, the second time one more, and adds the sums to global memory.
struct AddKernel {
  struct Params {
    const float* from;
    bool fence, wait;
    float* sums;
  };
  static constexpr int kThreads = 64;
  static constexpr int kSharedBytes = 1024 + 8;

  static ESPALIER_KERNEL void run(const Params& params) {
    auto* floats = reinterpret_cast<float*>(simt::shared());
    auto* barrier = reinterpret_cast<uint64_t*>(simt::shared() + 1024);
    make_barriers(barrier, 1);
    for (int round = 0; round < 2; ++round) {
      if (simt::thread() == 0) {
        simt::arrive_expecting(barrier, 1024);
        simt::load_bytes(floats, params.from, 1024, barrier);
      }
      simt::wait_phase(barrier, round);
      float* own = floats + 4 * simt::thread();
      FourFloats sum;
      for (int i = 0; i < 4; ++i) sum.values[i] = own[i] + static_cast<float>(4 * simt::thread() + i + round);
      simt::put(own, sum);
      if (params.fence) simt::fence_copies();
      simt::sync_block();
      if (simt::thread() == 0) {
        simt::add_floats(params.sums, floats, 1024);
        simt::commit_writes();
        if (params.wait || round == 1) simt::wait_writes_read<0>();
      }
      simt::sync_block();
    }
  }
};

/// Two threads for each vector of `sums` add their numbers, from the thread's own on.
struct AddVectorKernel {
  struct Params {
    float* sums;
  };
  static constexpr int kThreads = 128;

  static ESPALIER_KERNEL void run(const Params& params) {
    const auto own = static_cast<float>(simt::thread());
    simt::add_vector(params.sums + 4 * (simt::thread() % 64), FourFloats{{own, own + 1, own + 2, own + 3}});
  }
  /// Of what was there.
  static float expected(int i, float before) { return before + static_cast<float>(2 * (i / 4 + i % 4) + 64); }
};

}  // namespace espalier::testing
