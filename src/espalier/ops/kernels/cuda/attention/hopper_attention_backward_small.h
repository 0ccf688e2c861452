// SPDX-License-Identifier: Apache-2.0
// Backward attention on Hopper at head dimensions 64 and 128 (hopper_attention_backward.h).
//
// A thread block has 128 keys. Two warpgroups with 64 keys each accumulate dK and dV in registers. Tiles are
// transposed, keys by queries, so that P^T and dS^T stay in registers as operands of the next products. dS is
// also written to shared memory for dQ, which is summed over the keys of both; a warp of the third warpgroup
// adds dQ to global memory with TMA.
//
//                  head dimension 64        128
//   rows of a tile of queries    128         64
//   sums, registers a thread    P^T, dP^T 64 each, dK, dV 32 each, dQ 32 | 32 each, 64 each, 32
//   shared memory   K, V; Q and dO two stages each; dS two; dQ 32 KB: 192 KB
//
// Order of a step t of a consumer: S and dP; P, dS; dV (meanwhile dS becomes visible to the other warpgroup),
// dQ, dK, and during dK, dQ is passed to the adding warp. dS has two stages, so that one barrier per step
// suffices: dS of step t is written after the barrier of step t - 1, which the other warpgroup reaches only
// after its dQ of step t - 2.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention_backward_tiles.h"

namespace espalier::cuda::hopper {

/// Numbers of barriers between warps.
enum BackwardBarrier {
  kGradScoresWritten = 1,
  kGradQFull = 2,
  kGradQEmpty = 4
};  // the last two by warpgroup

/// For one warp: adds the dQ of both warpgroups to global memory.
template <class Tiles>
ESPALIER_KERNEL void add_grad_q(const BackwardParams& params) {
  constexpr int kFloats = Tiles::kGradQFloats / 2;  // of a warpgroup
  constexpr int kMeeting = simt::kWarpgroupSize + simt::kWarpSize;
  const auto* staged = reinterpret_cast<const float*>(simt::shared() + Tiles::kHandedOver);
  for (int group = 0; group < 2; ++group) simt::arrive_threads(kGradQEmpty + group, kMeeting);
  ESPALIER_ONE_BY_ONE
  for (BackwardSteps step(params); !step.done(); step.advance()) {
    float* to = params.grad_q + step.number(params) * Tiles::kGradQFloats;
    for (int group = 0; group < 2; ++group) {
      simt::sync_threads(kGradQFull + group, kMeeting);
      if (simt::lane() == 0) {
        simt::add_floats(to + group * kFloats, staged + group * kFloats, kFloats * 4);
        simt::commit_writes();
      }
      simt::sync_warp();
    }
    const bool last = step.left == 1;
    if (simt::lane() == 0) simt::wait_writes_read<1>();
    simt::sync_warp();
    if (!last) simt::arrive_threads(kGradQEmpty, kMeeting);
    if (simt::lane() == 0) simt::wait_writes_read<0>();
    simt::sync_warp();
    if (!last) simt::arrive_threads(kGradQEmpty + 1, kMeeting);
  }
}

/// One of 256 threads.
template <class Tiles, bool kAddsQueries>
class SmallBackwardConsumer {
 public:
  using Element = typename Tiles::Element;
  static constexpr int kRows = Tiles::kRows;
  static constexpr int kDim = Tiles::kHeadDim;

  ESPALIER_KERNEL explicit SmallBackwardConsumer(const BackwardParams& params)
      : params_(params), shared_(simt::shared()), group_(simt::warp() / 4), keys_(params, own_block(params)) {
    clear(grad_k_);
    clear(grad_v_);
  }

  ESPALIER_KERNEL void run() {
    const BackwardBarriers<Tiles> barriers(shared_);
    RingPlace<Tiles::kStages> place;
    simt::wait_phase(barriers.keys, 0);
    ESPALIER_ONE_BY_ONE
    for (BackwardSteps steps(params_); !steps.done(); steps.advance()) {
      step(barriers, place, steps.tile * params_.packing.tokens(kRows));
      place.advance();
    }
    hold_parts(grad_k_);
    hold_parts(grad_v_);
    keys_.store(params_, KeyGradient::kOfKeys, grad_k_);
    keys_.store(params_, KeyGradient::kOfValues, grad_v_);
  }

 private:
  ESPALIER_KERNEL void step(const BackwardBarriers<Tiles>& barriers, const RingPlace<Tiles::kStages>& place,
                            int32_t token) {
    const int stage = place.stage;
    const std::byte* q = shared_ + Tiles::kQ + stage * Tiles::kRowBytes;
    const std::byte* grad_out = shared_ + Tiles::kGradOut + stage * Tiles::kRowBytes;
    std::byte* grad_scores = shared_ + Tiles::kGradScores + stage * Tiles::kGradScoreBytes;
    float p[kRows / 2], ds[kRows / 2];
    simt::wait_phase(barriers.q_full + stage, place.parity);
    simt::fence_products();
    multiply_rows<Element, Tiles::kKeys, kRows, kDim>(p, shared_ + Tiles::kK, 64 * group_, q);
    simt::commit_products();
    simt::wait_phase(barriers.grad_out_full + stage, place.parity);
    simt::fence_products();
    multiply_rows<Element, Tiles::kKeys, kRows, kDim>(ds, shared_ + Tiles::kV, 64 * group_, grad_out);
    simt::commit_products();
    simt::wait_products<1>();
    simt::hold(p);
    const auto* lse = reinterpret_cast<const float*>(shared_ + Tiles::kLse + stage * Tiles::kStatisticBytes);
    keys_.exponentiate(p, lse, token);
    simt::wait_products<0>();
    simt::hold(ds);
    keys_.differentiate(ds, p, lse + (Tiles::kDelta - Tiles::kLse) / 4);
    uint32_t rounded_p[kRows / 16][4], rounded_ds[kRows / 16][4];
    round_sums<Element>(rounded_p, p);
    round_sums<Element>(rounded_ds, ds);
    if constexpr (kAddsQueries) keys_.write_grad_scores(grad_scores, rounded_ds);
    simt::fence_products();
    multiply_add_registers<Element, kRows>(grad_v_, rounded_p, grad_out);
    simt::commit_products();
    float grad_q[32];
    if constexpr (kAddsQueries) {
      simt::fence_copies();
      simt::sync_threads(kGradScoresWritten, kConsumers);
      simt::fence_products();
      multiply_grad_q(grad_q, grad_scores);
      simt::commit_products();
      simt::wait_products<1>();
      hold_all(rounded_p);
      release_stage(barriers.grad_out_empty + stage);
    }
    simt::fence_products();
    multiply_add_registers<Element, kRows>(grad_k_, rounded_ds, q);
    simt::commit_products();
    simt::wait_products<1>();
    if constexpr (kAddsQueries) {
      simt::hold(grad_q);
      hand_over(grad_q);
    } else {
      hold_all(rounded_p);
      release_stage(barriers.grad_out_empty + stage);
    }
    simt::wait_products<0>();
    hold_all(rounded_ds);
    release_stage(barriers.q_empty + stage);
  }

  /// 64 rows and columns of dQ = dS K, which is summed over the keys of both warpgroups.
  ESPALIER_KERNEL void multiply_grad_q(float (&grad_q)[32], const std::byte* grad_scores) const {
    const simt::Slabs<Tiles::kKeys> ds(grad_scores), k(shared_ + Tiles::kK);
    ESPALIER_UNROLL
    for (int key = 0; key < Tiles::kKeys; key += 16) {
      simt::multiply_async<Element, 64, Order::kKept, Order::kKept>(
          grad_q, ds.summed_rows(key, Tiles::grad_q_row(group_)),
          k.summed_rows(key, Tiles::grad_q_column(group_)), key > 0);
    }
  }

  /// Passes dQ to the adding warp.
  ESPALIER_KERNEL void hand_over(const float (&grad_q)[32]) const {
    constexpr int kMeeting = simt::kWarpgroupSize + simt::kWarpSize;
    auto* staged = reinterpret_cast<float*>(shared_ + Tiles::kHandedOver);
    simt::sync_threads(kGradQEmpty + group_, kMeeting);
    ESPALIER_UNROLL
    for (int v = 0; v < 8; ++v) {
      simt::put(staged + Tiles::grad_q_place(group_, v, simt::thread() % simt::kWarpgroupSize),
                Floats4{grad_q[4 * v], grad_q[4 * v + 1], grad_q[4 * v + 2], grad_q[4 * v + 3]});
    }
    simt::fence_copies();
    simt::arrive_threads(kGradQFull + group_, kMeeting);
  }

  const BackwardParams& params_;
  std::byte* shared_;
  int group_;
  KeyRows<Tiles> keys_;
  Sums<kDim> grad_k_;
  Sums<kDim> grad_v_;
};

}  // namespace espalier::cuda::hopper
