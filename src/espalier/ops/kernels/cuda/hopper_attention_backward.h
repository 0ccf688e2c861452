// Backward attention on Hopper: gradients of queries, keys and values (docs/math.md, "Attention by tiles").
//
//   P = exp(c Q K^T - lse),  dV = P^T dO,  dS = P * (dO V^T - delta),  dK = c dS^T Q,  dQ = c dS K
//
// after Shah et al., FlashAttention-3 (2024), section 3 and its backward pass. A block of threads has one
// block of 128 keys of one key head for good and goes over the tiles of queries that see any of them, which
// are contiguous. Two warpgroups of 64 keys each keep dK and dV in registers; everything is held transposed,
// keys by queries, so that P^T and dS^T go from the registers of one product into those of the next. dS also
// goes through shared memory, for dQ, whose sums over key blocks form in global memory by atomic adds of the
// copy engine: grad_q is not the same bits in every run, the rest is.
//
//                  head dimension 64        128
//   rows of a tile of queries    128         64
//   sums, registers a thread    P^T, dP^T 64 each, dK, dV 32 each, dQ 32 | 32 each, 64 each, 32
//   shared memory   K, V; Q and dO two stages each; dS two; dQ 32 KB: 192 KB
//
// Of the third warpgroup one warp loads and one adds dQ. Order of a step t of a consumer: S and dP; P, dS; dV
// (while dS becomes visible to the other warpgroup), dQ, dK, and while dK is worked out dQ goes to the adder.
// dS has two stages, so that one barrier a step is enough: who writes dS of step t has passed the barrier of
// step t - 1, which the other warpgroup reaches only after its dQ of step t - 2.
#pragma once

#include "espalier/ops/kernels/cuda/hopper_attention.h"

namespace espalier::cuda::hopper {

constexpr int kBackwardKeys = 128;  // of a block

struct BackwardParams {
  simt::TensorMap q;         // boxes of a tile of queries
  simt::TensorMap grad_out;  // likewise
  KeyMaps keys;
  AttentionProblem problem;
  AttentionGradients gradients;
  TileSchedule schedule;   // its query blocks are tiles
  const KeyPlace* places;  // by key block
  HeadPacking packing;
  // Scratch, by [head set of all heads, tile]:
  float* statistics;  // lse log2(e) of the tile's rows, infinite where there is no token; delta of them
  float* grad_q;      // null in a deterministic call; sums without the factor c, in the order of accumulators
                      // (BackwardTiles::grad_q_place)
};

template <class ElementType, int kDim>
struct BackwardTiles {
  using Element = ElementType;
  static constexpr int kHeadDim = kDim;
  static constexpr int kRows = kDim == 64 ? 128 : 64;
  static constexpr int kStages = 2;
  static constexpr int kKeyBytes = kBackwardKeys * kDim * 2;
  static constexpr int kRowBytes = kRows * kDim * 2;
  static constexpr int kStatisticBytes = kRows * 4;
  static constexpr int kGradScoreBytes = kBackwardKeys * kRows * 2;
  static constexpr int kGradQFloats = kRows * kDim;

  // Shared memory, by offsets.
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKeyBytes;
  static constexpr int kQ = kV + kKeyBytes;
  static constexpr int kGradOut = kQ + kStages * kRowBytes;
  static constexpr int kGradScores = kGradOut + kStages * kRowBytes;
  static constexpr int kGradQ = kGradScores + kStages * kGradScoreBytes;
  static constexpr int kLse = kGradQ + kGradQFloats * 4;
  static constexpr int kDelta = kLse + kStages * kStatisticBytes;
  static constexpr int kBarriers = kDelta + kStages * kStatisticBytes;
  static constexpr int kSharedBytes = kBarriers + 8 * (4 * kStages + 1);

  /// Where a thread of warpgroup `group` has its sums 4 v, ..., 4 v + 3 of a tile's dQ.
  static ESPALIER_SHARED_CODE int grad_q_place(int group, int v, int thread) {
    return ((group * 8 + v) * simt::kWarpgroupSize + thread) * 4;
  }
  /// The rows and columns of dQ that a warpgroup has begin there.
  static ESPALIER_SHARED_CODE int grad_q_row(int group) { return kDim == 64 ? 64 * group : 0; }
  static ESPALIER_SHARED_CODE int grad_q_column(int group) { return kDim == 64 ? 0 : 64 * group; }
};

/// Numbers of barriers between warps.
enum BackwardBarrier {
  kGradScoresWritten = 1,
  kGradQFull = 2,
  kGradQEmpty = 4
};  // the last two by warpgroup

struct alignas(16) Floats4 {
  float values[4];
};
struct alignas(8) Floats2 {
  float values[2];
};

/// Counting barriers of a block, in shared memory.
template <class Tiles>
struct BackwardBarriers {
  uint64_t* keys;
  uint64_t* q_full;
  uint64_t* q_empty;
  uint64_t* grad_out_full;
  uint64_t* grad_out_empty;

  ESPALIER_KERNEL explicit BackwardBarriers(std::byte* shared)
      : keys(reinterpret_cast<uint64_t*>(shared + Tiles::kBarriers)),
        q_full(keys + 1),
        q_empty(q_full + Tiles::kStages),
        grad_out_full(q_empty + Tiles::kStages),
        grad_out_empty(grad_out_full + Tiles::kStages) {}

  ESPALIER_KERNEL void init() const {
    simt::init_barrier(keys, 1);
    for (int s = 0; s < Tiles::kStages; ++s) {
      simt::init_barrier(q_full + s, 1);
      simt::init_barrier(q_empty + s, kConsumerWarps);
      simt::init_barrier(grad_out_full + s, 1);
      simt::init_barrier(grad_out_empty + s, kConsumerWarps);
    }
    simt::fence_barriers();
  }
};

/// The key block of a block of threads.
ESPALIER_KERNEL KeyBlock own_block(const BackwardParams& params) {
  return params.schedule.key_blocks[params.schedule.key_order[simt::block_x()]].block;
}

/// The steps of a block of threads: every tile that sees the key block, head set by head set.
struct BackwardSteps {
  int32_t set;  // of all heads
  int32_t tile;
  int32_t left;
  int32_t first_tile;
  int32_t end_tile;

  ESPALIER_KERNEL BackwardSteps(const BackwardParams& params, const KeyBlock& block)
      : set(simt::block_y() * params.packing.sets),
        tile(block.query_begin / params.schedule.inputs.sizes.queries),
        left(0),
        first_tile(tile),
        end_tile((block.query_end - 1) / params.schedule.inputs.sizes.queries + 1) {
    left = params.packing.sets * (end_tile - first_tile);
  }

  ESPALIER_KERNEL bool done() const { return left == 0; }
  ESPALIER_KERNEL void advance() {
    --left;
    if (++tile < end_tile) return;
    tile = first_tile;
    ++set;
  }
  /// Among all tiles of all sets.
  ESPALIER_KERNEL int64_t number(const BackwardParams& params) const {
    return int64_t{set} * params.schedule.inputs.num_query_blocks() + tile;
  }
};

/// By one thread.
template <class Tiles>
ESPALIER_KERNEL void load_backward(const BackwardParams& params) {
  constexpr int kRows = Tiles::kRows, kDim = Tiles::kHeadDim;
  const KeyBlock block = own_block(params);
  const int key_head = simt::block_y();
  std::byte* shared = simt::shared();
  const BackwardBarriers<Tiles> barriers(shared);
  const KeyPlace from = params.places[params.schedule.key_order[simt::block_x()]];
  simt::arrive_expecting(barriers.keys, 2 * Tiles::kKeyBytes);
  load_tile<kBackwardKeys, kDim>(shared + Tiles::kK, params.keys.keys(from.rectangle), barriers.keys,
                                 key_head, from.token);
  load_tile<kBackwardKeys, kDim>(shared + Tiles::kV, params.keys.values(from.rectangle), barriers.keys,
                                 key_head, from.token);
  RingPlace<Tiles::kStages> place;
  ESPALIER_ONE_BY_ONE
  for (BackwardSteps step(params, block); !step.done(); step.advance()) {
    const int stage = place.stage, head = step.set << params.packing.shift;
    const int token = step.tile * params.packing.tokens(kRows);
    const float* statistics = params.statistics + step.number(params) * (2 * kRows);
    const auto load = [&](uint64_t* full, uint64_t* empty, const simt::TensorMap* map, std::byte* rows,
                          const float* from, std::byte* to) {
      simt::wait_phase(empty + stage, place.parity ^ 1);
      simt::arrive_expecting(full + stage, Tiles::kRowBytes + Tiles::kStatisticBytes);
      load_tile<kRows, kDim>(rows + stage * Tiles::kRowBytes, map, full + stage, head, token);
      simt::load_bytes(to + stage * Tiles::kStatisticBytes, from, Tiles::kStatisticBytes, full + stage);
    };
    load(barriers.q_full, barriers.q_empty, &params.q, shared + Tiles::kQ, statistics, shared + Tiles::kLse);
    load(barriers.grad_out_full, barriers.grad_out_empty, &params.grad_out, shared + Tiles::kGradOut,
         statistics + kRows, shared + Tiles::kDelta);
    place.advance();
  }
}

/// By one warp: adds what the warpgroups leave of dQ.
template <class Tiles>
ESPALIER_KERNEL void add_grad_q(const BackwardParams& params) {
  constexpr int kFloats = Tiles::kGradQFloats / 2;  // of a warpgroup
  constexpr int kMeeting = simt::kWarpgroupSize + simt::kWarpSize;
  const auto* staged = reinterpret_cast<const float*>(simt::shared() + Tiles::kGradQ);
  for (int group = 0; group < 2; ++group) simt::arrive_threads(kGradQEmpty + group, kMeeting);
  ESPALIER_ONE_BY_ONE
  for (BackwardSteps step(params, own_block(params)); !step.done(); step.advance()) {
    float* to = params.grad_q + step.number(params) * Tiles::kGradQFloats;
    for (int group = 0; group < 2; ++group) {
      simt::sync_threads(kGradQFull + group, kMeeting);
      if (simt::lane() == 0) {
        simt::add_floats(to + group * kFloats, staged + group * kFloats, kFloats * 4);
        simt::commit_adds();
      }
      simt::sync_warp();
    }
    const bool last = step.left == 1;
    if (simt::lane() == 0) simt::wait_adds_read<1>();
    simt::sync_warp();
    if (!last) simt::arrive_threads(kGradQEmpty, kMeeting);
    if (simt::lane() == 0) simt::wait_adds_read<0>();
    simt::sync_warp();
    if (!last) simt::arrive_threads(kGradQEmpty + 1, kMeeting);
  }
}

/// One of 256 threads: keys of rows 16 warp + lane / 4 and 8 more of the block.
template <class Tiles, bool kAddsQueries>
class BackwardConsumer {
 public:
  using Element = typename Tiles::Element;
  static constexpr int kRows = Tiles::kRows;
  static constexpr int kDim = Tiles::kHeadDim;

  ESPALIER_KERNEL explicit BackwardConsumer(const BackwardParams& params)
      : params_(params),
        shared_(simt::shared()),
        group_(simt::warp() / 4),
        written_(simt::slab_offset(simt::thread() / 32 * 16 + simt::lane() % 16, simt::lane() / 16)),
        scale_(params.problem.softmax_scale * kLog2E) {}

  ESPALIER_KERNEL void run() {
    const BackwardBarriers<Tiles> barriers(shared_);
    float grad_k[kDim / 2], grad_v[kDim / 2];
    ESPALIER_UNROLL
    for (int i = 0; i < kDim / 2; ++i) grad_k[i] = grad_v[i] = 0;
    RingPlace<Tiles::kStages> place;
    simt::wait_phase(barriers.keys, 0);
    const KeyBlock block = own_block(params_);
    look_up(block);
    ESPALIER_ONE_BY_ONE
    for (BackwardSteps steps(params_, block); !steps.done(); steps.advance()) {
      step(barriers, place, steps.tile * params_.packing.tokens(kRows), grad_k, grad_v);
      place.advance();
    }
    // Read again: meanwhile the registers are needed.
    const KeyBlock own = own_block(params_);
    const KeyGradients& to = params_.gradients.grad_sources[own.segment + 1];
    store(to.grad_k, own, grad_k, params_.problem.softmax_scale);
    store(to.grad_v, own, grad_v, 1.0F);
  }

 private:
  ESPALIER_KERNEL void step(const BackwardBarriers<Tiles>& barriers, const RingPlace<Tiles::kStages>& place,
                            int32_t token, float (&grad_k)[kDim / 2], float (&grad_v)[kDim / 2]) const {
    const int stage = place.stage;
    const std::byte* q = shared_ + Tiles::kQ + stage * Tiles::kRowBytes;
    const std::byte* grad_out = shared_ + Tiles::kGradOut + stage * Tiles::kRowBytes;
    std::byte* grad_scores = shared_ + Tiles::kGradScores + stage * Tiles::kGradScoreBytes;
    float p[kRows / 2], ds[kRows / 2];
    simt::wait_phase(barriers.q_full + stage, place.parity);
    simt::fence_products();
    multiply_rows<Element, kBackwardKeys, kRows, kDim>(p, shared_ + Tiles::kK, 64 * group_, q);
    simt::commit_products();
    simt::wait_phase(barriers.grad_out_full + stage, place.parity);
    simt::fence_products();
    multiply_rows<Element, kBackwardKeys, kRows, kDim>(ds, shared_ + Tiles::kV, 64 * group_, grad_out);
    simt::commit_products();
    simt::wait_products<1>();
    simt::hold(p);
    const auto* lse = reinterpret_cast<const float*>(shared_ + Tiles::kLse + stage * Tiles::kStatisticBytes);
    if (full_begin_ <= token && token + params_.packing.tokens(kRows) <= full_end_) {
      exponentiate<false>(p, lse, token);
    } else {
      exponentiate<true>(p, lse, token);
    }
    simt::wait_products<0>();
    simt::hold(ds);
    differentiate(ds, p, lse + (Tiles::kDelta - Tiles::kLse) / 4);
    uint32_t rounded_p[kRows / 16][4], rounded_ds[kRows / 16][4];
    round_sums<Element>(rounded_p, p);
    round_sums<Element>(rounded_ds, ds);
    if constexpr (kAddsQueries) write_grad_scores(grad_scores, rounded_ds);
    simt::fence_products();
    multiply_add_registers<Element, kRows, kDim>(grad_v, rounded_p, grad_out);
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
      release(barriers.grad_out_empty + stage);
    }
    simt::fence_products();
    multiply_add_registers<Element, kRows, kDim>(grad_k, rounded_ds, q);
    simt::commit_products();
    simt::wait_products<1>();
    if constexpr (kAddsQueries) {
      simt::hold(grad_q);
      hand_over(grad_q);
    } else {
      hold_all(rounded_p);
      release(barriers.grad_out_empty + stage);
    }
    simt::wait_products<0>();
    hold_all(rounded_ds);
    release(barriers.q_empty + stage);
  }

  /// S to P.
  template <bool kMasked>
  ESPALIER_KERNEL void exponentiate(float (&s)[kRows / 2], const float* lse, int32_t token) const {
    SeenRows seen[2];
    if constexpr (kMasked) {
      for (int i = 0; i < 2; ++i) seen[i] = SeenRows::of(seers_[i], token, params_.packing, kRows);
    }
    ESPALIER_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
      const Floats2 own = *reinterpret_cast<const Floats2*>(lse + 8 * j + 2 * (simt::lane() % 4));
      ESPALIER_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        x = x * scale_ - own.values[i % 2];
        if constexpr (kMasked) x = seen[i / 2].include(8 * j + i % 2) ? x : -INFINITY;
        x = simt::exp2(x);
      }
    }
  }

  /// dP to dS.
  ESPALIER_KERNEL void differentiate(float (&dp)[kRows / 2], const float (&p)[kRows / 2],
                                     const float* delta) const {
    ESPALIER_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
      const Floats2 own = *reinterpret_cast<const Floats2*>(delta + 8 * j + 2 * (simt::lane() % 4));
      ESPALIER_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& x = dp[4 * j + i];
        x = p[4 * j + i] * (x - own.values[i % 2]);
      }
    }
  }

  /// Keys by queries, in slabs.
  ESPALIER_KERNEL void write_grad_scores(std::byte* to, const uint32_t (&ds)[kRows / 16][4]) const {
    ESPALIER_UNROLL
    for (int s = 0; s < kRows / 16; ++s) {
      // Chunk 2 s + lane / 16 of row 16 warp + lane % 16: within a slab the chunk's number is exclusive-ored.
      simt::put_matrices(to + s / 4 * (kBackwardKeys * simt::kSlabRowBytes) + (written_ ^ s % 4 << 5), ds[s]);
    }
  }

  /// 64 rows and columns of dQ = dS K, which is summed over the keys of both warpgroups.
  ESPALIER_KERNEL void multiply_grad_q(float (&grad_q)[32], const std::byte* grad_scores) const {
    const simt::Slabs<kBackwardKeys> ds(grad_scores), k(shared_ + Tiles::kK);
    ESPALIER_UNROLL
    for (int key = 0; key < kBackwardKeys; key += 16) {
      simt::multiply_async<Element, 64, Order::kKept, Order::kKept>(
          grad_q, ds.summed_rows(key, Tiles::grad_q_row(group_)),
          k.summed_rows(key, Tiles::grad_q_column(group_)), key > 0);
    }
  }

  /// To the warp that adds.
  ESPALIER_KERNEL void hand_over(const float (&grad_q)[32]) const {
    constexpr int kMeeting = simt::kWarpgroupSize + simt::kWarpSize;
    auto* staged = reinterpret_cast<float*>(shared_ + Tiles::kGradQ);
    simt::sync_threads(kGradQEmpty + group_, kMeeting);
    ESPALIER_UNROLL
    for (int v = 0; v < 8; ++v) {
      simt::put(staged + Tiles::grad_q_place(group_, v, simt::thread() % simt::kWarpgroupSize),
                Floats4{grad_q[4 * v], grad_q[4 * v + 1], grad_q[4 * v + 2], grad_q[4 * v + 3]});
    }
    simt::fence_copies();
    simt::arrive_threads(kGradQFull + group_, kMeeting);
  }

  /// Who sees the thread's keys.
  ESPALIER_KERNEL void look_up(const KeyBlock& block) {
    for (int i = 0; i < 2; ++i)
      seers_[i] = Seers::of(block, params_.problem.subtree_end, accumulator_row() + 8 * i);
    full_begin_ = block.full_begin;
    full_end_ = block.num_keys() == kBackwardKeys ? block.full_end : 0;
  }

  static ESPALIER_KERNEL void release(uint64_t* empty) {
    simt::sync_warp();  // what its lanes read of the stage by themselves
    if (simt::lane() == 0) simt::arrive(empty);
  }

  ESPALIER_KERNEL void store(const TokenHeadsData& to, const KeyBlock& block, const float (&sums)[kDim / 2],
                             float factor) const {
    ESPALIER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = accumulator_row() + 8 * i;
      if (row >= block.num_keys()) continue;
      auto* out = static_cast<Element*>(to.data) + (block.begin + row) * to.token_stride +
                  simt::block_y() * to.head_stride + 2 * (simt::lane() % 4);
      ESPALIER_UNROLL
      for (int j = 0; j < kDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(out + 8 * j) =
            simt::pack<Element>(sums[4 * j + 2 * i] * factor, sums[4 * j + 2 * i + 1] * factor);
      }
    }
  }

  const BackwardParams& params_;
  std::byte* shared_;
  int group_;
  int written_;
  float scale_;
  int32_t full_begin_;  // queries that see all of kBackwardKeys keys
  int32_t full_end_;
  Seers seers_[2];
};

inline Grid key_grid(const BackwardParams& params) {
  return {params.schedule.inputs.num_key_blocks(), params.problem.num_key_heads};
}
inline Grid tile_grid(const BackwardParams& params) {
  return {params.schedule.inputs.num_query_blocks(), params.problem.num_key_heads * params.packing.sets};
}

/// Blocks of key_grid, of kThreads threads. Without kAddsQueries nothing becomes of dQ.
template <class Element, int kHeadDim, bool kAddsQueries>
ESPALIER_KERNEL void backward_keys(const BackwardParams& params) {
  using Tiles = BackwardTiles<Element, kHeadDim>;
  const int warp = simt::warp();
  if (simt::thread() == 0) BackwardBarriers<Tiles>(simt::shared()).init();
  simt::sync_block();
  // What a branch needs it works out by itself: what lived across would have to fit into the movers'
  // registers.
  if (warp >= kConsumerWarps) {
    simt::shrink_registers<kMoverRegisters>();
    if (warp == kConsumerWarps && simt::lane() == 0) load_backward<Tiles>(params);
    if (kAddsQueries && warp == kConsumerWarps + 1) add_grad_q<Tiles>(params);
  } else {
    simt::grow_registers<kConsumerRegisters>();
    BackwardConsumer<Tiles, kAddsQueries>(params).run();
  }
}

// Before and after ----------------------------------------------------------------------------------------

constexpr int kRowThreads = 128;

/// Blocks of tile_grid, of kRowThreads threads. Statistics, and zeros where dQ will be summed.
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

/// Blocks of tile_grid, of kConsumers threads: sums of dQ to where they belong.
template <class Element, int kHeadDim>
ESPALIER_KERNEL void finish_grad_q(const BackwardParams& params) {
  using Tiles = BackwardTiles<Element, kHeadDim>;
  const int64_t number =
      int64_t{simt::block_y()} * params.schedule.inputs.num_query_blocks() + simt::block_x();
  const float* sums = params.grad_q + number * Tiles::kGradQFloats;
  const int group = simt::warp() / 4, thread = simt::thread() % simt::kWarpgroupSize;
  const TokenHeadsData& to = params.gradients.grad_q;
  Element* rows[2];  // of this thread's columns; null where there is no token
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
  for (int v = 0; v < 8; ++v) {
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
