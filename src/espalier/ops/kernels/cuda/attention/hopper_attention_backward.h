// SPDX-License-Identifier: Apache-2.0
// Backward attention on Hopper: gradients of queries, keys and values (docs/math.md, "Attention by tiles").
//
//   P = exp(c Q K^T - lse),  dV = P^T dO,  dS = P * (dO V^T - delta),  dK = c dS^T Q,  dQ = c dS K
//
// after Shah et al., FlashAttention-3 (2024), section 3 and its backward pass. A thread block owns one key
// block of one key head and iterates over the tiles of queries that see any of its keys, which are
// contiguous, or over a part of them (key_parts.h). Two warpgroups accumulate dK and dV in registers in
// float32 (hopper_attention_backward_small.h, hopper_attention_backward_large.h); a third one moves data. dQ
// is accumulated in global memory in float32 by atomic adds: grad_q is not bitwise reproducible, everything
// else is.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention_backward_large.h"
#include "espalier/ops/kernels/cuda/attention/hopper_attention_backward_small.h"

namespace espalier::cuda::hopper {

inline Grid part_grid(const BackwardParams& params) {
  return {part_blocks(params.parts.inputs, params.schedule.inputs), 1};
}
inline Grid cut_grid(const BackwardParams& params) {
  return {params.schedule.inputs.num_key_blocks(),
          params.parts.cut_parts == 0 ? 0 : params.problem.num_key_heads};
}
inline Grid tile_grid(const BackwardParams& params) {
  return {params.schedule.inputs.num_query_blocks(), params.problem.num_key_heads * params.packing.sets};
}

/// Blocks of part_grid, of kThreads threads. Without kAddsQueries, dQ is skipped.
template <class Element, int kHeadDim, bool kAddsQueries>
ESPALIER_KERNEL void backward_keys(const BackwardParams& params) {
  using Tiles = BackwardTiles<Element, kHeadDim>;
  const int warp = simt::warp();
  if (own_part(params).block < 0) return;
  if (simt::thread() == 0) BackwardBarriers<Tiles>(simt::shared()).init();
  simt::sync_block();
  // Each branch computes what it needs: values live across the branch would have to fit the movers'
  // registers.
  if (warp >= kConsumerWarps) {
    simt::shrink_registers<kMoverRegisters>();
    if (warp == kConsumerWarps && simt::lane() == 0) load_backward<Tiles>(params);
    if constexpr (!Tiles::kLarge && kAddsQueries) {
      if (warp == kConsumerWarps + 1) add_grad_q<Tiles>(params);
    }
    return;
  }
  simt::grow_registers<kConsumerRegisters>();
  if constexpr (!Tiles::kLarge) {
    SmallBackwardConsumer<Tiles, kAddsQueries>(params).run();
  } else if (warp < kConsumerWarps / 2) {
    ValueGradientConsumer<Tiles, kAddsQueries>(params).run();
  } else {
    KeyGradientConsumer<Tiles, kAddsQueries>(params).run();
  }
}

// Before and after ----------------------------------------------------------------------------------------

constexpr int kRowThreads = 128;

/// Blocks of tile_grid, of kRowThreads threads. Computes row statistics and zero-fills the dQ accumulators.
template <class Element, int kHeadDim>
ESPALIER_KERNEL void prepare_backward(const BackwardParams& params) {
  using Tiles = BackwardTiles<Element, kHeadDim>;
  constexpr int kLanes = kHeadDim / 8, kRowsAtOnce = kRowThreads / kLanes;  // lanes of a row
  const int64_t number =
      int64_t{simt::block_y()} * params.schedule.inputs.num_query_blocks() + simt::block_x();
  const int first_token = simt::block_x() * params.packing.tokens(Tiles::kRows);
  const int first_head = simt::block_y() << params.packing.shift;
  float* statistics = params.statistics + number * (2 * Tiles::kRows);
  const int column = simt::thread() % kLanes * 8;
  for (int row = simt::thread() / kLanes; row < Tiles::kRows; row += kRowsAtOnce) {
    const int64_t token = first_token + params.packing.tokens(row);
    const int64_t head = first_head + (row & (params.packing.packed() - 1));
    float delta = 0, lse = INFINITY;
    if (token < params.problem.num_tokens) {
      const auto load = [&](const TokenHeadsData& from) {
        return *reinterpret_cast<const simt::Vector16*>(static_cast<const Element*>(from.data) +
                                                        token * from.token_stride + head * from.head_stride +
                                                        column);
      };
      const simt::Vector16 out = load(params.gradients.out), grad = load(params.gradients.grad_out);
      for (int i = 0; i < 4; ++i) {
        const simt::FloatPair o = simt::unpack<Element>(out.words[i]),
                              g = simt::unpack<Element>(grad.words[i]);
        delta += o.low * g.low + o.high * g.high;
      }
      lse = params.gradients.lse[head * params.problem.num_tokens + token] * kLog2E;
    }
    for (int mask = kLanes / 2; mask > 0; mask /= 2) delta += simt::shuffle_xor(delta, mask);
    if (column == 0) {
      statistics[row] = lse;
      statistics[Tiles::kRows + row] = delta;
    }
  }
  if (params.grad_q == nullptr) return;
  auto* sums = reinterpret_cast<Floats4*>(params.grad_q + number * Tiles::kGradQFloats);
  for (int i = simt::thread(); i < Tiles::kGradQFloats / 4; i += kRowThreads) sums[i] = {{0, 0, 0, 0}};
}

/// Blocks of cut_grid, of kConsumers threads: Combines dK and dV of key blocks that are cut.
template <class Element, int kHeadDim>
ESPALIER_KERNEL void join_key_gradients(const BackwardParams& params) {
  using Tiles = BackwardTiles<Element, kHeadDim>;
  const int32_t block = simt::block_x(), head = simt::block_y();
  const KeyCut cut = params.parts.cuts[block];
  if (cut.parts == 1) return;
  // At the large head dimension each warpgroup handles one of the two, as in backward_keys.
  if (!Tiles::kLarge || simt::thread() >= Tiles::kKeySumThreads) {
    KeyRows<Tiles>::join(params, block, head, cut, KeyGradient::kOfKeys);
  }
  if (!Tiles::kLarge || simt::thread() < Tiles::kKeySumThreads) {
    KeyRows<Tiles>::join(params, block, head, cut, KeyGradient::kOfValues);
  }
}

/// Blocks of tile_grid, of kConsumers threads: converts the dQ accumulators to grad_q.
template <class Element, int kHeadDim>
ESPALIER_KERNEL void finish_grad_q(const BackwardParams& params) {
  using Tiles = BackwardTiles<Element, kHeadDim>;
  const int64_t number =
      int64_t{simt::block_y()} * params.schedule.inputs.num_query_blocks() + simt::block_x();
  const float* sums = params.grad_q + number * Tiles::kGradQFloats;
  const int group = simt::warp() / 4, thread = simt::thread() % simt::kWarpgroupSize;
  const TokenHeadsData& to = params.gradients.grad_q;
  Element* rows[2];  // at this thread's columns; null if there is no token
  ESPALIER_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = Tiles::grad_q_row(group) + accumulator_row() % 64 + 8 * i;
    const int64_t token = simt::block_x() * params.packing.tokens(Tiles::kRows) + params.packing.tokens(row);
    const int64_t head = (simt::block_y() << params.packing.shift) + (row & (params.packing.packed() - 1));
    rows[i] = token >= params.problem.num_tokens
                  ? nullptr
                  : static_cast<Element*>(to.data) + token * to.token_stride + head * to.head_stride +
                        Tiles::grad_q_column(group) + 2 * (simt::lane() % 4);
  }
  ESPALIER_UNROLL
  for (int v = 0; v < Tiles::kGradQSums / 4; ++v) {
    const auto sum = *reinterpret_cast<const Floats4*>(sums + Tiles::grad_q_place(group, v, thread));
    ESPALIER_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (rows[i] == nullptr) continue;
      *reinterpret_cast<uint32_t*>(rows[i] + 8 * v) =
          simt::pack<Element>(sum.values[2 * i] * params.problem.softmax_scale,
                              sum.values[2 * i + 1] * params.problem.softmax_scale);
    }
  }
}

}  // namespace espalier::cuda::hopper
