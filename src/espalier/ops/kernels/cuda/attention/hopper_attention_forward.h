// SPDX-License-Identifier: Apache-2.0
// Forward attention on Hopper (docs/math.md, "Attention by tiles"): O = softmax(c Q K^T) V over the keys that
// a query sees, and lse.
//
// After Shah et al., FlashAttention-3 (2024), section 3. Persistent thread blocks take tiles of 128 rows of
// queries from a counter in global memory, and walk the tiles of keys that any row sees; the first keys of
// the next tile are loaded while the last rows are stored. Two warpgroups with 64 rows each keep O, maxima
// and sums in registers; P stays in registers as operand of the next product. One warp of a third warpgroup
// loads. In a step a warpgroup starts S of this tile and O += P V of the previous one, and computes the
// softmax of S while the other product is in flight. The warpgroups take turns in starting products, so that
// the softmax of one overlaps with the products of the other.
//
//                  head dimension 64        128       256
//   keys of a tile              128        128        64
//   registers a thread: O, S, P  32, 64, 32 | 64, 64, 32 | 128, 32, 16
//   stages of K and V             4          2         2
//   shared memory, Q too        144        160       192 KB
//
// Sums are in the order of the walk: bitwise reproducible.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention.h"

namespace espalier::cuda::hopper {

struct ForwardParams {
  simt::TensorMap q;    // boxes of a tile
  simt::TensorMap out;  // of a warpgroup's rows
  KeyMaps keys;
  AttentionProblem problem;
  AttentionOutputs outputs;
  TileSchedule schedule;   // its query blocks are tiles
  const KeyPlace* places;  // by key block
  const int32_t* ends;     // by key block and key: one past the last query that sees it
  HeadPacking packing;
  TileOrder order;
  int32_t workers;     // blocks of threads
  WorkCounter* taken;  // of the tiles
};

template <class ElementType, int kDim>
struct ForwardTiles {
  using Element = ElementType;
  static constexpr int kHeadDim = kDim;
  static constexpr int kRows = 128;
  static constexpr int kKeys = kDim == 256 ? 64 : 128;
  static constexpr int kStages = kDim == 64 ? 4 : 2;
  static constexpr int kValueStages = kStages;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kKeyBytes = kKeys * kDim * 2;
  static constexpr int kEndBytes = kKeys * 4;

  // Shared memory, by offsets.
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kQueryBytes;
  static constexpr int kV = kK + kStages * kKeyBytes;
  static constexpr int kEnds = kV + kStages * kKeyBytes;
  static constexpr int kNotes = kEnds + kStages * kEndBytes;
  static constexpr int kTile = kNotes + kStages * 16;  // which one it is
  static constexpr int kBarriers = kTile + 16;
  static constexpr int kSharedBytes = kBarriers + 8 * (4 * kStages + 2);
};

/// Information about a tile from the loading warp, in shared memory.
struct TileNote {
  int32_t first_key;    // in the forest; kNoKey for context
  int32_t first_query;  // queries before it see nothing
  bool masked;          // whether some pairs of the tile are masked
  bool last;
};
constexpr int32_t kNoKey = INT32_MIN;

struct alignas(8) TwoEnds {
  int32_t keys[2];
};

/// Named barriers: for turns between the two warpgroups, and within each.
enum ForwardBarrier { kTurn = 1, kRowsWritten = 3 };

template <class Tiles>
struct ForwardBarriers {
  uint64_t* q;
  uint64_t* q_empty;
  uint64_t* k_full;
  uint64_t* k_empty;
  uint64_t* v_full;
  uint64_t* v_empty;

  ESPALIER_KERNEL explicit ForwardBarriers(std::byte* shared)
      : q(reinterpret_cast<uint64_t*>(shared + Tiles::kBarriers)),
        q_empty(q + 1),
        k_full(q + 2),
        k_empty(k_full + Tiles::kStages),
        v_full(k_empty + Tiles::kStages),
        v_empty(v_full + Tiles::kValueStages) {}

  ESPALIER_KERNEL void init() const {
    simt::init_barrier(q, 1);
    simt::init_barrier(q_empty, 2);  // warpgroups
    for (int s = 0; s < Tiles::kStages; ++s) {
      simt::init_barrier(k_full + s, 1);
      simt::init_barrier(k_empty + s, kConsumerWarps);
    }
    for (int s = 0; s < Tiles::kValueStages; ++s) {
      simt::init_barrier(v_full + s, 1);
      simt::init_barrier(v_empty + s, kConsumerWarps);
    }
    simt::fence_barriers();
  }
};

/// A tile of queries, by its index in the order.
struct OwnTile {
  int32_t tile;
  int32_t set;  // of all heads
};
template <class Params>
ESPALIER_KERNEL OwnTile tile_at(const Params& params, int32_t number) {
  const TileOrder::Place place = params.order[number];
  return {params.schedule.query_order[place.rank], place.set};
}

/// Positions in the rings of keys and values.
template <class Tiles>
struct KeyRings {
  RingPlace<Tiles::kStages> k;
  RingPlace<Tiles::kValueStages> v;
};

/// Loads keys and values of all tiles that a tile of queries sees, with notes; by one thread. Calls
/// load_queries() after the first ones.
template <class Tiles, class Params, class LoadQueries>
ESPALIER_KERNEL void load_key_tiles(const Params& params, const OwnTile& own,
                                    const ForwardBarriers<Tiles>& barriers, KeyRings<Tiles>& rings,
                                    const LoadQueries& load_queries) {
  constexpr int kKeys = Tiles::kKeys, kDim = Tiles::kHeadDim;
  std::byte* shared = simt::shared();
  const int32_t begin = params.schedule.query_begin(own.tile), end = params.schedule.query_end(own.tile);
  const int32_t key_head = own.set / params.packing.sets;
  TileWalk walk(params.schedule, own.tile);
  int32_t acquired = -1;  // last rectangle acquired; acquiring refetches its maps
  bool first = true;
  while (!walk.done()) {
    const int stage = rings.k.stage;
    const int64_t index = walk.index();
    const KeyBlock block = walk.block();
    const KeyPlace from = params.places[index];
    walk.advance();
    if (from.rectangle != acquired) params.keys.acquire(from.rectangle);
    acquired = from.rectangle;
    const bool full = block.num_keys() == kKeys && classify(block, begin, end) == TileClass::kFull;
    simt::wait_phase(barriers.k_empty + stage, rings.k.parity ^ 1);
    reinterpret_cast<TileNote*>(shared + Tiles::kNotes)[stage] = {block.segment < 0 ? block.begin : kNoKey,
                                                                  block.query_begin, !full, walk.done()};
    simt::arrive_expecting(barriers.k_full + stage, Tiles::kKeyBytes + Tiles::kEndBytes);
    load_tile<kKeys, kDim>(shared + Tiles::kK + stage * Tiles::kKeyBytes, params.keys.keys(from.rectangle),
                           barriers.k_full + stage, key_head, from.token);
    simt::load_bytes(shared + Tiles::kEnds + stage * Tiles::kEndBytes, params.ends + index * kKeys,
                     Tiles::kEndBytes, barriers.k_full + stage);
    const int value_stage = rings.v.stage;
    simt::wait_phase(barriers.v_empty + value_stage, rings.v.parity ^ 1);
    simt::arrive_expecting(barriers.v_full + value_stage, Tiles::kKeyBytes);
    load_tile<kKeys, kDim>(shared + Tiles::kV + value_stage * Tiles::kKeyBytes,
                           params.keys.values(from.rectangle), barriers.v_full + value_stage, key_head,
                           from.token);
    rings.k.advance();
    rings.v.advance();
    if (first) load_queries();
    first = false;
  }
}

constexpr int32_t kNoTile = -1;

// The mover keeps tiles, walks and rings.
constexpr int kForwardConsumerRegisters = 232;
constexpr int kForwardMoverRegisters = 40;

/// By one thread.
template <class Tiles>
ESPALIER_KERNEL void load_forward(const ForwardParams& params) {
  const ForwardBarriers<Tiles> barriers(simt::shared());
  auto* tile = reinterpret_cast<int32_t*>(simt::shared() + Tiles::kTile);
  KeyRings<Tiles> rings;
  RingPlace<1> q_place;
  ESPALIER_ONE_BY_ONE
  for (int32_t number = params.taken->next(); number < params.order.blocks(); number = params.taken->next()) {
    const OwnTile own = tile_at(params, number);
    load_key_tiles(params, own, barriers, rings, [&] {
      simt::wait_phase(barriers.q_empty, q_place.parity ^ 1);
      *tile = number;
      simt::arrive_expecting(barriers.q, Tiles::kQueryBytes);
      load_tile<Tiles::kRows, Tiles::kHeadDim>(simt::shared() + Tiles::kQ, &params.q, barriers.q,
                                               own.set << params.packing.shift,
                                               params.schedule.query_begin(own.tile));
    });
    q_place.advance();
  }
  simt::wait_phase(barriers.q_empty, q_place.parity ^ 1);
  *tile = kNoTile;
  simt::arrive(barriers.q);
  params.taken->finish(params.workers);
}

/// Sets masked scores to minus infinity. `query`: the queries of the two rows.
template <int kKeys>
ESPALIER_KERNEL void mask_scores(float (&s)[kKeys / 2], const TileNote& note, const int32_t* ends,
                                 const int32_t (&query)[2]) {
  const int first = 2 * (simt::lane() % 4);
  // Key `column` is seen by query j iff column <= newest and j < end(column).
  int32_t newest[2];
  ESPALIER_UNROLL
  for (int i = 0; i < 2; ++i) {
    newest[i] = query[i] < note.first_query ? -1
                : note.first_key == kNoKey  ? kKeys
                                            : query[i] - note.first_key;
    newest[i] -= first;
  }
  ESPALIER_UNROLL
  for (int j = 0; j < kKeys / 8; ++j) {
    const TwoEnds end = *reinterpret_cast<const TwoEnds*>(ends + 8 * j + first);
    ESPALIER_UNROLL
    for (int i = 0; i < 4; ++i) {
      float& x = s[4 * j + i];
      x = 8 * j + i % 2 <= newest[i / 2] && query[i / 2] < end.keys[i % 2] ? x : -INFINITY;
    }
  }
}

/// One of 256 threads: rows 16 warp + lane / 4 and 8 more of the tile.
template <class Tiles>
class ForwardConsumer {
 public:
  using Element = typename Tiles::Element;
  static constexpr int kKeys = Tiles::kKeys;
  static constexpr int kDim = Tiles::kHeadDim;

  ESPALIER_KERNEL explicit ForwardConsumer(const ForwardParams& params)
      : params_(params),
        shared_(simt::shared()),
        group_(simt::warp() / 4),
        scale_(params.problem.softmax_scale * kLog2E) {}

  ESPALIER_KERNEL void run() {
    const ForwardBarriers<Tiles> barriers(shared_);
    RingPlace<Tiles::kStages> place;
    ESPALIER_ONE_BY_ONE
    for (RingPlace<1> q_place;; q_place.advance()) {
      simt::wait_phase(barriers.q, q_place.parity);
      const int32_t number = *reinterpret_cast<const int32_t*>(shared_ + Tiles::kTile);
      if (number == kNoTile) return;
      begin(number);
      attend(barriers, place);
      store(number);
      if (simt::thread() % simt::kWarpgroupSize == 0) simt::arrive(barriers.q_empty);
    }
  }

 private:
  ESPALIER_KERNEL void begin(int32_t number) {
    const int row = accumulator_row();
    const int32_t token = params_.schedule.query_begin(tile_at(params_, number).tile);
    ESPALIER_UNROLL
    for (int i = 0; i < 2; ++i) {
      query_[i] = token + params_.packing.tokens(row + 8 * i);
      maximum_[i] = -INFINITY;
      sum_[i] = 0;
    }
    clear(out_);
  }

  /// Computes O of a tile, unnormalised. `place`: of its first keys; set to that of the next tile.
  ESPALIER_KERNEL void attend(const ForwardBarriers<Tiles>& barriers, RingPlace<Tiles::kStages>& place) {
    if (group_ == 1) simt::arrive_threads(kTurn, kConsumers);  // the other one's turn
    RingPlace<Tiles::kStages> last;
    uint32_t p[kKeys / 16][4];
    bool more = start(barriers, place, p);
    ESPALIER_ONE_BY_ONE
    while (more) {
      last = place;
      place.advance();
      more = step(barriers, place, last, p);
    }
    simt::wait_phase(barriers.v_full + place.stage, place.parity);
    simt::fence_products();
    multiply_values(p, place.stage);
    simt::commit_products();
    simt::wait_products<0>();
    hold_all(p);
    hold_parts(out_);
    release_stage(barriers.v_empty + place.stage);
    place.advance();
  }

  /// Computes P of the first tile. Returns whether there is another tile.
  ESPALIER_KERNEL bool start(const ForwardBarriers<Tiles>& barriers, const RingPlace<Tiles::kStages>& place,
                             uint32_t (&p)[kKeys / 16][4]) {
    float s[kKeys / 2];
    simt::wait_phase(barriers.k_full + place.stage, place.parity);
    const TileNote note = note_of(place.stage);
    simt::sync_threads(kTurn + group_, kConsumers);
    simt::fence_products();
    multiply_keys(s, place.stage);
    simt::commit_products();
    pass_turn(note.last);
    simt::wait_products<0>();
    simt::hold(s);
    if (note.masked) mask(s, note, place.stage);
    release_stage(barriers.k_empty + place.stage);
    float factor[2];
    exponentiate(s, factor);
    round_sums<Element>(p, s);
    return !note.last;
  }

  /// O += P V of the previous tile, then P of this one.
  ESPALIER_KERNEL bool step(const ForwardBarriers<Tiles>& barriers, const RingPlace<Tiles::kStages>& place,
                            const RingPlace<Tiles::kStages>& last, uint32_t (&p)[kKeys / 16][4]) {
    float s[kKeys / 2];
    simt::wait_phase(barriers.k_full + place.stage, place.parity);
    const TileNote note = note_of(place.stage);
    simt::sync_threads(kTurn + group_, kConsumers);
    simt::fence_products();
    multiply_keys(s, place.stage);
    simt::commit_products();
    simt::wait_phase(barriers.v_full + last.stage, last.parity);
    simt::fence_products();
    multiply_values(p, last.stage);
    simt::commit_products();
    pass_turn(note.last);
    simt::wait_products<1>();
    simt::hold(s);
    if (note.masked) mask(s, note, place.stage);
    release_stage(barriers.k_empty + place.stage);
    float factor[2];
    exponentiate(s, factor);
    simt::settle(sum_[0] + sum_[1]);
    simt::wait_products<0>();
    hold_all(p);
    hold_parts(out_);
    release_stage(barriers.v_empty + last.stage);
    round_sums<Element>(p, s);
    ESPALIER_UNROLL
    for (auto& part : out_) {
      ESPALIER_UNROLL
      for (int i = 0; i < std::ssize(part); ++i) part[i] *= factor[i / 2 % 2];
    }
    return !note.last;
  }

  ESPALIER_KERNEL TileNote note_of(int stage) const {
    return reinterpret_cast<const TileNote*>(shared_ + Tiles::kNotes)[stage];
  }
  /// The last turn of the second warpgroup is not awaited.
  ESPALIER_KERNEL void pass_turn(bool last) const {
    if (group_ == 0 || !last) simt::arrive_threads(kTurn + 1 - group_, kConsumers);
  }

  ESPALIER_KERNEL void multiply_keys(float (&s)[kKeys / 2], int stage) const {
    multiply_rows<Element, Tiles::kRows, kKeys, kDim>(s, shared_ + Tiles::kQ, 64 * group_,
                                                      shared_ + Tiles::kK + stage * Tiles::kKeyBytes);
  }
  ESPALIER_KERNEL void multiply_values(const uint32_t (&p)[kKeys / 16][4], int stage) {
    multiply_add_registers<Element, kKeys>(out_, p, shared_ + Tiles::kV + stage * Tiles::kKeyBytes);
  }

  ESPALIER_KERNEL void mask(float (&s)[kKeys / 2], const TileNote& note, int stage) const {
    const auto* ends = reinterpret_cast<const int32_t*>(shared_ + Tiles::kEnds + stage * Tiles::kEndBytes);
    mask_scores<kKeys>(s, note, ends, query_);
  }

  /// S to P, with the new maximum; O so far must be multiplied by `factor`.
  ESPALIER_KERNEL void exponentiate(float (&s)[kKeys / 2], float (&factor)[2]) {
    ESPALIER_UNROLL
    for (int i = 0; i < 2; ++i) {
      float most = maximum_[i];
      ESPALIER_UNROLL
      for (int j = 0; j < kKeys / 8; ++j) {
        most = std::fmax(most, std::fmax(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
      }
      most = std::fmax(most, simt::shuffle_xor(most, 1));
      most = std::fmax(most, simt::shuffle_xor(most, 2));
      // P is zero for rows without a visible key so far.
      const float shift = most == -INFINITY ? 0.0F : most * scale_;
      factor[i] = simt::exp2(maximum_[i] * scale_ - shift);
      maximum_[i] = most;
      float sum = sum_[i] * factor[i];
      ESPALIER_UNROLL
      for (int j = 0; j < kKeys / 8; ++j) {
        ESPALIER_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * i + e];
          x = simt::exp2(x * scale_ - shift);
          sum += x;
        }
      }
      sum_[i] = sum;
    }
  }

  ESPALIER_KERNEL void store(int32_t number) const {
    const OwnTile own = tile_at(params_, number);
    const int first_head = own.set << params_.packing.shift;
    float factors[2];
    ESPALIER_UNROLL
    for (int i = 0; i < 2; ++i) {
      float sum = sum_[i];
      sum += simt::shuffle_xor(sum, 1);
      sum += simt::shuffle_xor(sum, 2);
      const int row = accumulator_row() + 8 * i;
      const int64_t token = query_[i];
      const int64_t head = first_head + (row & (params_.packing.packed() - 1));
      if (simt::lane() % 4 == 0 && token < params_.problem.num_tokens) {
        params_.outputs.lse[head * params_.problem.num_tokens + token] =
            kLn2 * (maximum_[i] * scale_ + simt::log2(sum));
      }
      factors[i] = 1 / sum;
    }
    // Q's rows of this warpgroup are no longer used.
    store_rows<Element, Tiles::kRows>(
        &params_.out, first_head,
        params_.schedule.query_begin(own.tile) + params_.packing.tokens(kRowsOfWarpgroup * group_),
        shared_ + Tiles::kQ, group_, kRowsWritten + group_, out_, factors);
  }

  const ForwardParams& params_;
  std::byte* shared_;
  int group_;
  float scale_;
  int32_t query_[2];
  float maximum_[2];  // of the scores, without the factor c
  float sum_[2];      // of this lane's columns of P
  Sums<kDim> out_;
};

/// params.workers blocks of kThreads threads. The scale must be positive.
template <class Element, int kHeadDim>
ESPALIER_KERNEL void forward_tile(const ForwardParams& params) {
  using Tiles = ForwardTiles<Element, kHeadDim>;
  const int warp = simt::warp();
  if (simt::thread() == 0) ForwardBarriers<Tiles>(simt::shared()).init();
  simt::sync_block();
  // Each branch computes what it needs: values live across the branch would have to fit the mover's
  // registers.
  if (warp >= kConsumerWarps) {
    simt::shrink_registers<kForwardMoverRegisters>();
    if (warp == kConsumerWarps && simt::lane() == 0) load_forward<Tiles>(params);
  } else {
    simt::grow_registers<kForwardConsumerRegisters>();
    ForwardConsumer<Tiles>(params).run();
  }
}

}  // namespace espalier::cuda::hopper
