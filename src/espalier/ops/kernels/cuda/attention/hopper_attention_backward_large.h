// SPDX-License-Identifier: Apache-2.0
// Backward attention on Hopper at head dimension 256 (hopper_attention_backward.h).
//
// A thread block has 64 keys, and each of two warpgroups accumulates one of their gradients, [64, 256] in
// registers: the first computes S, P and dV, the second dP, dS and dK, with P^T and dS^T as register
// operands, and each half of the columns of dQ. P is passed through shared memory in float32, thread to
// thread, and so is dS for dQ. dQ is added to global memory from registers, a vector of four sums at a time.
//
//   sums, registers a thread    S or dP 32, dV or dK 128, dQ 64
//   shared memory   K, V; Q and dO two stages each; dS; P: 217 KB
//
// A step has two barriers: P written, and dS written. P of a step is written after the barrier that follows
// the reads of the previous P; dS is written after the barrier that follows the previous dQ. dP of the next
// step overlaps with dK.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention_backward_tiles.h"

namespace espalier::cuda::hopper {

/// Numbers of barriers between the two warpgroups.
enum LargeBackwardBarrier { kProbabilitiesWritten = 1, kScoresDifferentiated = 2 };

/// Shared by the two warpgroups.
template <class Tiles>
class LargeBackwardPart {
 public:
  using Element = typename Tiles::Element;
  static constexpr int kRows = Tiles::kRows;
  static constexpr int kDim = Tiles::kHeadDim;
  static_assert(Tiles::kKeys == 64 && kRows == 64 && Tiles::kGradQSums == 64);

 protected:
  ESPALIER_KERNEL LargeBackwardPart(const BackwardParams& params, int group)
      : params_(params), shared_(simt::shared()), barriers_(shared_), group_(group) {}

  ESPALIER_KERNEL std::byte* q() const { return shared_ + Tiles::kQ + place_.stage * Tiles::kRowBytes; }
  ESPALIER_KERNEL std::byte* grad_out() const {
    return shared_ + Tiles::kGradOut + place_.stage * Tiles::kRowBytes;
  }
  /// lse or delta of the tile's rows.
  ESPALIER_KERNEL const float* statistics(int of) const {
    return reinterpret_cast<const float*>(shared_ + of + place_.stage * Tiles::kStatisticBytes);
  }
  /// Elements 4 v to 4 v + 3 of P of this thread, or of the thread of the other warpgroup with the same
  /// elements of dP.
  ESPALIER_KERNEL Floats4& probabilities(int v) const {
    return reinterpret_cast<Floats4*>(
        shared_ + Tiles::kHandedOver)[v * simt::kWarpgroupSize + simt::thread() % simt::kWarpgroupSize];
  }

  /// Computes this warpgroup's half of dQ = dS K.
  ESPALIER_KERNEL void multiply_grad_q(float (&grad_q)[64]) const {
    const simt::Slabs<Tiles::kKeys> ds(shared_ + Tiles::kGradScores), k(shared_ + Tiles::kK);
    ESPALIER_UNROLL
    for (int key = 0; key < Tiles::kKeys; key += 16) {
      simt::multiply_async<Element, 128, Order::kKept, Order::kKept>(
          grad_q, ds.summed_rows(key, 0), k.summed_rows(key, Tiles::grad_q_column(group_)), key > 0);
    }
  }
  ESPALIER_KERNEL void add_grad_q(const float (&grad_q)[64], const BackwardSteps& step) const {
    float* to = params_.grad_q + step.number(params_) * Tiles::kGradQFloats;
    ESPALIER_UNROLL
    for (int v = 0; v < 16; ++v) {
      simt::add_vector(to + Tiles::grad_q_place(group_, v, simt::thread() % simt::kWarpgroupSize),
                       Floats4{grad_q[4 * v], grad_q[4 * v + 1], grad_q[4 * v + 2], grad_q[4 * v + 3]});
    }
  }

  const BackwardParams& params_;
  std::byte* shared_;
  BackwardBarriers<Tiles> barriers_;
  int group_;
  RingPlace<Tiles::kStages> place_;
  Sums<kDim> sums_;  // of the gradient
};

/// The first warpgroup: S, P and dV.
template <class Tiles, bool kAddsQueries>
class ValueGradientConsumer : LargeBackwardPart<Tiles> {
  using Part = LargeBackwardPart<Tiles>;
  using Part::barriers_, Part::params_, Part::place_, Part::shared_, Part::sums_;
  using typename Part::Element;
  static constexpr int kRows = Tiles::kRows;

 public:
  ESPALIER_KERNEL explicit ValueGradientConsumer(const BackwardParams& params)
      : Part(params, 0), keys_(params, own_block(params)) {
    clear(sums_);
  }

  ESPALIER_KERNEL void run() {
    simt::wait_phase(barriers_.keys, 0);
    ESPALIER_ONE_BY_ONE
    for (BackwardSteps steps(params_); !steps.done(); steps.advance()) {
      step(steps);
      place_.advance();
    }
    keys_.store(params_, KeyGradient::kOfValues, sums_);
  }

 private:
  ESPALIER_KERNEL void step(const BackwardSteps& steps) {
    float p[kRows / 2];
    simt::wait_phase(barriers_.q_full + place_.stage, place_.parity);
    simt::fence_products();
    multiply_rows<Element, Tiles::kKeys, kRows, Tiles::kHeadDim>(p, shared_ + Tiles::kK, 0, this->q());
    simt::commit_products();
    simt::wait_products<0>();
    simt::hold(p);
    keys_.exponentiate(p, this->statistics(Tiles::kLse), steps.tile * params_.packing.tokens(kRows));
    release_stage(barriers_.q_empty + place_.stage);
    ESPALIER_UNROLL
    for (int v = 0; v < kRows / 8; ++v)
      this->probabilities(v) = {{p[4 * v], p[4 * v + 1], p[4 * v + 2], p[4 * v + 3]}};
    simt::arrive_threads(kProbabilitiesWritten, kConsumers);
    uint32_t rounded[kRows / 16][4];
    round_sums<Element>(rounded, p);
    simt::wait_phase(barriers_.grad_out_full + place_.stage, place_.parity);
    simt::fence_products();
    multiply_add_registers<Element, kRows>(sums_, rounded, this->grad_out());
    simt::commit_products();
    simt::sync_threads(kScoresDifferentiated, kConsumers);
    float grad_q[64];
    if constexpr (kAddsQueries) {
      simt::fence_products();
      this->multiply_grad_q(grad_q);
      simt::commit_products();
      simt::wait_products<1>();
    } else {
      simt::wait_products<0>();
    }
    hold_all(rounded);
    release_stage(barriers_.grad_out_empty + place_.stage);
    if constexpr (kAddsQueries) {
      simt::wait_products<0>();
      simt::hold(grad_q);
      this->add_grad_q(grad_q, steps);
    }
    hold_parts(sums_);
  }

  KeyRows<Tiles> keys_;
};

/// The second one: dP, dS and dK.
template <class Tiles, bool kAddsQueries>
class KeyGradientConsumer : LargeBackwardPart<Tiles> {
  using Part = LargeBackwardPart<Tiles>;
  using Part::barriers_, Part::params_, Part::place_, Part::shared_, Part::sums_;
  using typename Part::Element;
  static constexpr int kRows = Tiles::kRows;

 public:
  ESPALIER_KERNEL explicit KeyGradientConsumer(const BackwardParams& params) : Part(params, 1) {}

  ESPALIER_KERNEL void run() {
    simt::wait_phase(barriers_.keys, 0);
    ESPALIER_ONE_BY_ONE
    for (BackwardSteps steps(params_); !steps.done(); steps.advance()) {
      step(steps);
      q_empty_ = barriers_.q_empty + place_.stage;
      place_.advance();
    }
    simt::wait_products<0>();
    hold_all(rounded_);
    hold_parts(sums_);
    KeyRows<Tiles>::store(params_, KeyGradient::kOfKeys, sums_);
  }

 private:
  /// Leaves the product for dK in flight. Its first product overwrites, because accumulators must not be
  /// cleared while a product is in flight.
  ESPALIER_KERNEL void step(const BackwardSteps& steps) {
    float ds[kRows / 2];
    simt::wait_phase(barriers_.grad_out_full + place_.stage, place_.parity);
    simt::fence_products();
    multiply_rows<Element, Tiles::kKeys, kRows, Tiles::kHeadDim>(ds, shared_ + Tiles::kV, 0,
                                                                 this->grad_out());
    simt::commit_products();
    simt::wait_products<1>();
    hold_all(rounded_);
    hold_parts(sums_);
    if (q_empty_ != nullptr) release_stage(q_empty_);
    simt::wait_products<0>();
    simt::hold(ds);
    simt::sync_threads(kProbabilitiesWritten, kConsumers);
    float p[kRows / 2];
    ESPALIER_UNROLL
    for (int v = 0; v < kRows / 8; ++v) {
      const Floats4 four = this->probabilities(v);
      ESPALIER_UNROLL
      for (int i = 0; i < 4; ++i) p[4 * v + i] = four.values[i];
    }
    KeyRows<Tiles>::differentiate(ds, p, this->statistics(Tiles::kDelta));
    release_stage(barriers_.grad_out_empty + place_.stage);
    round_sums<Element>(rounded_, ds);
    if constexpr (kAddsQueries) {
      KeyRows<Tiles>::write_grad_scores(shared_ + Tiles::kGradScores, rounded_);
      simt::fence_copies();
    }
    simt::sync_threads(kScoresDifferentiated, kConsumers);
    float grad_q[64];
    if constexpr (kAddsQueries) {
      simt::fence_products();
      this->multiply_grad_q(grad_q);
      simt::commit_products();
    }
    simt::wait_phase(barriers_.q_full + place_.stage, place_.parity);
    simt::fence_products();
    multiply_add_registers<Element, kRows>(sums_, rounded_, this->q(), q_empty_ != nullptr);
    simt::commit_products();
    if constexpr (kAddsQueries) {
      simt::wait_products<1>();
      simt::hold(grad_q);
      this->add_grad_q(grad_q, steps);
    }
  }

  uint32_t rounded_[kRows / 16][4] = {};  // dS of the previous step,
  uint64_t* q_empty_ = nullptr;           // and its stage
};

}  // namespace espalier::cuda::hopper
