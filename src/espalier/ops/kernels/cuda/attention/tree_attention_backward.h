// SPDX-License-Identifier: Apache-2.0
// Attention backward on mma.sync. With c = softmax_scale, lse over all keys and delta_j = sum_d dO_jd O_jd,
//     P_ij = exp(c s_ij - lse_i),  dV = P^T dO,  dS = P (dO V^T - delta),  dK = c dS^T Q,  dQ = c dS K
// (docs/math.md; FlashAttention-2, algorithm 2). Kernels:
//
//   attention_delta     a warp for 512 / head_dim rows (token, head): delta.
//   attend_keys         a block of threads has one key block and one key head. Its K and V stay in shared
//                       memory, dK and dV in registers, while it goes over the rows (tokens of its contiguous
//                       range of query blocks, all heads of the group: no expansion of K and V, no atomics
//                       for their gradients), or over a part of them (key_parts.h). dQ is added to float32
//                       sums by atomics, or not at all.
//   join_keys           dK and dV of key blocks that are cut: the sums of their parts.
//   sums_to_queries     these sums to dQ.
//   attend_queries      deterministic mode: dQ alone (tree_attention_queries.h).
//
// attend_keys computes S^T, with keys as rows: a warp has 32 of the keys and a part of the 64 query rows of a
// tile, and for dK and dV the same keys and a part of the columns. P^T and dS^T go through shared memory. Two
// barriers per tile: when Q and dO (prefetched during the previous tile) have arrived, and between dS and the
// products with it. With kStages == 1 they are fetched at the end, after a third barrier.
//
//   head_dim   keys x rows   warps (keys x parts)   stages   shared memory   dK, dV, S, dP, dQ in a thread
//       64      128 x 64            4 x 2              2         99 KiB        32 + 32 + 32 + 32 + 16
//      128      128 x 64            4 x 2              2        163 KiB        64 + 64 + 32 + 32 + 32
//      256       64 x 64            2 x 4              2        209 KiB        64 + 64 + 16 + 16 + 64
//      256       64 x 64            2 x 4              1        145 KiB        where there is no more
//
// Uses all 255 registers at 128 and 256, with up to nine words spilled.
// P is float32 for dS and rounded to the element for dV; dS is rounded; sums are float32. The order of dQ's
// sums is not deterministic; everything else, and everything in deterministic mode, is bitwise reproducible.
#pragma once

#include "espalier/ops/kernels/cuda/attention/attention_tiles.h"
#include "espalier/ops/kernels/cuda/attention/key_parts.h"

namespace espalier::cuda {

struct BackwardParams {
  TileSchedule schedule;
  KeyParts parts;  // of attend_keys
  const KeySource* sources;
  const KeyGradients* grad_sources;
  TokenHeadsData q;
  TokenHeadsData grad_out;
  TokenHeadsData out;
  TokenHeadsData grad_q;
  const float* lse;  // [heads, tokens]
  float* delta;      // [heads, tokens]
  float* sums;       // of dQ: num_sums() floats, zero before attend_keys; null: skip
  RowPacking packing;
  int32_t group;
  int32_t num_heads;
  float scale;  // softmax_scale, positive
};

template <class Element_, int kDim_, int kStages_>
struct BackwardTiles {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kStages = kStages_;
  static constexpr int kRows = 64;
  static constexpr int kKeys = kDim == 256 ? 64 : 128;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * simt::kWarpSize;
  static constexpr int kKeyWarps = kKeys / 32;
  static constexpr int kParts = kWarps / kKeyWarps;
  static constexpr int64_t kSharedBytes =
      (2 * kKeys * kDim + 2 * kStages * kRows * kDim + 2 * kKeys * kRows) * int64_t{sizeof(Element)} +
      (2 * 2 * kRows + kRows + 2 * kKeys) * int64_t{sizeof(float)};
};

template <class Tiles>
int64_t num_sums(const TileSchedule& schedule, const RowPacking& packing, int32_t num_heads) {
  return int64_t{schedule.inputs.num_query_blocks()} * (num_heads / packing.packed) * Tiles::kRows *
         Tiles::kDim;
}

// delta --------------------------------------------------------------------------------------------------

constexpr int kDeltaThreads = 256;

template <int kDim>
int64_t delta_grid(int64_t num_tokens, int64_t num_heads) {
  constexpr int64_t kRowsOfBlock = kDeltaThreads / (kDim / kChunk);
  return (num_tokens * num_heads + kRowsOfBlock - 1) / kRowsOfBlock;
}

template <class Element, int kDim>
ESPALIER_KERNEL void attention_delta(const BackwardParams& params) {
  constexpr int kRowLanes = kDim / kChunk, kRowsOfBlock = kDeltaThreads / kRowLanes;
  const int64_t tokens = params.schedule.inputs.num_tokens;
  const int64_t row = int64_t{simt::block_x()} * kRowsOfBlock + simt::thread() / kRowLanes;
  const bool valid = row < tokens * params.num_heads;
  const int64_t token = valid ? row / params.num_heads : 0, head = valid ? row % params.num_heads : 0;
  const int first = simt::lane() % kRowLanes * kChunk;
  const auto load = [&](const TokenHeadsData& tensor) {
    const auto* data = static_cast<const Element*>(tensor.data);
    return *reinterpret_cast<const simt::Vector16*>(data + token * tensor.token_stride +
                                                    head * tensor.head_stride + first);
  };
  const simt::Vector16 out = load(params.out), grad_out = load(params.grad_out);
  float sum = 0;
  ESPALIER_UNROLL
  for (int i = 0; i < 4; ++i) {
    const simt::FloatPair a = simt::unpack<Element>(out.words[i]);
    const simt::FloatPair b = simt::unpack<Element>(grad_out.words[i]);
    sum += a.low * b.low + a.high * b.high;
  }
  ESPALIER_UNROLL
  for (int mask = kRowLanes / 2; mask > 0; mask /= 2) sum += simt::shuffle_xor(sum, mask);
  if (valid && first == 0) params.delta[head * tokens + token] = sum;
}

/// Rows of a query block: tokens, and `packed` heads from head_begin.
struct RowBlock {
  RowPacking packing;
  int32_t query_begin;
  int32_t query_end;
  int32_t head_begin;

  ESPALIER_KERNEL int num_rows() const { return (query_end - query_begin) * packing.packed; }
  ESPALIER_KERNEL int32_t token(int row) const { return query_begin + packing.token(row); }
  ESPALIER_KERNEL int64_t head(int row) const { return head_begin + packing.head(row); }
  ESPALIER_KERNEL int64_t offset(const TokenHeadsData& tensor, int row) const {
    return token(row) * tensor.token_stride + head(row) * tensor.head_stride;
  }
};

// dK, dV and the sums of dQ ------------------------------------------------------------------------------

template <class Tiles>
class KeyGradientBlock {
  using Element = typename Tiles::Element;
  static constexpr int kDim = Tiles::kDim, kRows = Tiles::kRows, kKeys = Tiles::kKeys;
  static constexpr int kThreads = Tiles::kThreads, kStages = Tiles::kStages, kParts = Tiles::kParts;
  static constexpr int kPartRows = kRows / kParts, kRowTiles = kPartRows / 8;  // of S^T and dP^T
  static constexpr int kPartColumns = kDim / kParts;                           // of dK and dV
  // dQ: 2 x 4 warps.
  static constexpr int kQueryRows = kRows / 2, kQueryColumns = kDim / 4;
  using Scores = Accumulators<2, kRowTiles>;

  /// Per-row data of a tile.
  struct RowData {
    float lse[kRows];  // times log2(e)
    float delta[kRows];
  };
  template <class T>
  struct alignas(8) Pair {
    T first, second;
  };

 public:
  ESPALIER_KERNEL KeyGradientBlock(const BackwardParams& params, int32_t block, int32_t head)
      : params_(params),
        block_(params.schedule.key_blocks[block].block),
        head_(head),
        key_row_(simt::warp() / kParts * 32),
        part_(simt::warp() % kParts) {}

  /// Processes the steps of a part: query blocks, head part by head part.
  ESPALIER_KERNEL void run(const KeyPart& own) {
    const SeeingTiles seeing = SeeingTiles::of(block_, params_.schedule.inputs.sizes.queries);
    const StepRange range = own.range(seeing.count() * params_.packing.parts);
    int32_t left = range.end - range.begin;
    begin_keys();
    grad_k_.clear();
    grad_v_.clear();
    int32_t query_block = seeing.first + range.begin % seeing.count(), part = range.begin / seeing.count();
    int stage = 0;
    RowBlock rows = row_block(query_block, part);
    store_row_datum(stage, load_row_datum(rows));
    copy_rows_of(rows, stage);
    while (true) {
      simt::wait_copies<0>();
      simt::sync_block();  // Q, dO and row data have arrived; P, dS and the other stage are free
      const int32_t this_block = query_block, this_part = part;
      const RowBlock these = rows;
      if (++query_block == seeing.end) {
        query_block = seeing.first;
        ++part;
      }
      const bool more = --left > 0;
      Pair<float> datum{};
      if (more) {
        rows = row_block(query_block, part);
        datum = load_row_datum(rows);
        if (kStages > 1) copy_rows_of(rows, stage ^ 1);
      }
      make_scores(these, stage);
      if (more) store_row_datum(stage ^ 1, datum);
      simt::sync_block();  // P and dS are written
      add_gradients(stage, this_block, this_part);
      if (!more) break;
      if (kStages == 1) {
        simt::sync_block();  // Q and dO are free
        copy_rows_of(rows, stage ^ 1);
      }
      stage ^= 1;
    }
    if (own.parts == 1) {
      simt::sync_block();  // K and V are done with
      store();
      return;
    }
    const int32_t number = params_.parts.cuts[own.block].first + own.part;
    visit_sums(number, [](Floats4& sums, const float (&d)[4]) { sums = {{d[0], d[1], d[2], d[3]}}; });
  }

  /// Computes dK and dV from the sums of a block's parts.
  ESPALIER_KERNEL void join(const KeyCut& cut) {
    grad_k_.clear();
    grad_v_.clear();
    for (int32_t part = 0; part < cut.parts; ++part) {
      visit_sums(cut.first + part, [](const Floats4& sums, float (&d)[4]) {
        ESPALIER_UNROLL
        for (int i = 0; i < 4; ++i) d[i] += sums.values[i];
      });
    }
    store();
  }

 private:
  ESPALIER_KERNEL Element* keys() const { return reinterpret_cast<Element*>(simt::shared()); }
  ESPALIER_KERNEL Element* values() const { return keys() + kKeys * kDim; }
  ESPALIER_KERNEL Element* queries(int stage) const {
    return values() + kKeys * kDim + (kStages > 1 ? stage * 2 * kRows * kDim : 0);
  }
  ESPALIER_KERNEL Element* grad_out(int stage) const { return queries(stage) + kRows * kDim; }
  ESPALIER_KERNEL Element* p() const { return values() + kKeys * kDim + kStages * 2 * kRows * kDim; }
  ESPALIER_KERNEL Element* ds() const { return p() + kKeys * kRows; }
  ESPALIER_KERNEL RowData& row_data(int stage) const {
    return reinterpret_cast<RowData*>(ds() + kKeys * kRows)[stage];
  }
  ESPALIER_KERNEL int32_t* tokens() const { return reinterpret_cast<int32_t*>(&row_data(2)); }  // of rows
  // Key i of the block is visible to queries [first, end).
  ESPALIER_KERNEL int32_t* firsts() const { return tokens() + kRows; }
  ESPALIER_KERNEL int32_t* ends() const { return firsts() + kKeys; }

  ESPALIER_KERNEL RowBlock row_block(int32_t query_block, int32_t part) const {
    return {params_.packing, params_.schedule.query_begin(query_block),
            params_.schedule.query_end(query_block), head_ * params_.group + part * params_.packing.packed};
  }

  ESPALIER_KERNEL void begin_keys() {
    const KeySource& source = params_.sources[block_.segment + 1];
    copy_keys<kKeys, kDim, kThreads>(keys(), source.k, head_, block_);
    copy_keys<kKeys, kDim, kThreads>(values(), source.v, head_, block_);
    simt::commit_copies();
    if (simt::thread() < kRows) tokens()[simt::thread()] = params_.packing.token(simt::thread());
    if (const int i = simt::thread(); i < kKeys) {
      firsts()[i] = block_.segment < 0 ? block_.begin + i : block_.query_begin;
      ends()[i] = KeyMask::end(block_, params_.schedule.inputs.subtree_end, i);
    }
  }

  ESPALIER_KERNEL void copy_rows_of(const RowBlock& rows, int stage) {
    const auto copy = [&](Element* tile, const TokenHeadsData& tensor) {
      const auto* data = static_cast<const Element*>(tensor.data);
      copy_rows<kRows, kDim, kThreads>(
          tile, [&](int row) { return data + rows.offset(tensor, row); },
          [&](int row) { return row < rows.num_rows(); });
    };
    copy(queries(stage), params_.q);
    copy(grad_out(stage), params_.grad_out);
    simt::commit_copies();
  }

  /// Loads lse and delta of this thread's row, among the first kRows. Missing rows have zero Q and dO and do
  /// not contribute to products.
  ESPALIER_KERNEL Pair<float> load_row_datum(const RowBlock& rows) const {
    const int row = simt::thread();
    if (row >= rows.num_rows()) return {};
    const int64_t index = rows.head(row) * params_.schedule.inputs.num_tokens + rows.token(row);
    return {params_.lse[index], params_.delta[index]};
  }
  ESPALIER_KERNEL void store_row_datum(int stage, const Pair<float>& datum) {
    const int row = simt::thread();
    if (row >= kRows) return;
    row_data(stage).lse[row] = datum.first * kLog2E;
    row_data(stage).delta[row] = datum.second;
  }

  /// Data of two columns of S^T, which are rows of the tile.
  template <class T>
  ESPALIER_KERNEL Pair<T> columns(const T* all, int n) const {
    const int column = part_ * kPartRows + 8 * n + simt::lane() % 4 * 2;
    return *reinterpret_cast<const Pair<T>*>(all + column);
  }

  /// Writes P^T and dS^T to shared memory.
  ESPALIER_KERNEL void make_scores(const RowBlock& rows, int stage) {
    const RowData& data = row_data(stage);
    Scores scores, grads;
    scores.clear();
    multiply_rows<kDim>(scores, keys(), key_row_, queries(stage), part_ * kPartRows);
    if (KeyMask(block_, rows.query_begin, rows.query_end, kKeys).needed) hide(scores, rows);
    const float scale = params_.scale * kLog2E;
    ESPALIER_UNROLL
    for (int n = 0; n < kRowTiles; ++n) {
      const Pair<float> lse = columns(data.lse, n);
      ESPALIER_UNROLL
      for (int m = 0; m < 2; ++m) {
        ESPALIER_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& s = scores.at[m][n][i];
          s = simt::exp2(s * scale - (i % 2 == 0 ? lse.first : lse.second));
        }
      }
    }
    scores.template store<kRows>(p(), key_row_, part_ * (kPartRows / 8), 1.0F);
    grads.clear();
    multiply_rows<kDim>(grads, values(), key_row_, grad_out(stage), part_ * kPartRows);
    ESPALIER_UNROLL
    for (int n = 0; n < kRowTiles; ++n) {
      const Pair<float> delta = columns(data.delta, n);
      ESPALIER_UNROLL
      for (int m = 0; m < 2; ++m) {
        ESPALIER_UNROLL
        for (int i = 0; i < 4; ++i) {
          grads.at[m][n][i] =
              scores.at[m][n][i] * (grads.at[m][n][i] - (i % 2 == 0 ? delta.first : delta.second));
        }
      }
    }
    grads.template store<kRows>(ds(), key_row_, part_ * (kPartRows / 8), 1.0F);
  }

  ESPALIER_KERNEL void hide(Scores& scores, const RowBlock& rows) {
    int32_t first[2][2], end[2][2];  // in tokens of the query block
    ESPALIER_UNROLL
    for (int m = 0; m < 2; ++m) {
      ESPALIER_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int key = key_row_ + 16 * m + 8 * half + simt::lane() / 4;
        first[m][half] = firsts()[key] - rows.query_begin;
        end[m][half] = ends()[key] - rows.query_begin;
      }
    }
    ESPALIER_UNROLL
    for (int n = 0; n < kRowTiles; ++n) {
      const Pair<int32_t> query = columns(tokens(), n);
      ESPALIER_UNROLL
      for (int m = 0; m < 2; ++m) {
        ESPALIER_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int32_t j = i % 2 == 0 ? query.first : query.second;
          if (j < first[m][i / 2] || j >= end[m][i / 2]) scores.at[m][n][i] = -INFINITY;
        }
      }
    }
  }

  ESPALIER_KERNEL void add_gradients(int stage, int32_t query_block, int32_t part) {
    const int chunk = part_ * (kPartColumns / kChunk);
    const MatrixPointer<kRows, MatrixOrder::kRowsFirst> left(key_row_);
    multiply_columns<kRows / 16, kDim>(
        grad_v_,
        [&](uint32_t (&a)[4], int m, int step) { simt::load_matrices(a, p() + left.at(16 * m, 2 * step)); },
        grad_out(stage), chunk);
    multiply_columns<kRows / 16, kDim>(
        grad_k_,
        [&](uint32_t (&a)[4], int m, int step) { simt::load_matrices(a, ds() + left.at(16 * m, 2 * step)); },
        queries(stage), chunk);
    if (params_.sums != nullptr) add_query_sums(query_block, part);
  }

  ESPALIER_KERNEL void add_query_sums(int32_t query_block, int32_t part) {
    Accumulators<kQueryRows / 16, kQueryColumns / 8> sums;
    sums.clear();
    const int row_part = simt::warp() / 4, column_part = simt::warp() % 4;
    const MatrixPointer<kRows, MatrixOrder::kChunksFirst> left(0, row_part * (kQueryRows / 8));
    multiply_columns<kKeys / 16, kDim>(
        sums,
        [&](uint32_t (&a)[4], int m, int step) {
          simt::load_matrices_transposed(a, ds() + left.at(16 * step, 2 * m));
        },
        keys(), column_part * (kQueryColumns / kChunk));
    const int64_t tile =
        (int64_t{head_} * params_.packing.parts + part) * params_.schedule.inputs.num_query_blocks() +
        query_block;
    float* to = params_.sums + tile * (kRows * kDim) + simt::warp() * 128;
    ESPALIER_UNROLL
    for (int m = 0; m < kQueryRows / 16; ++m) {
      ESPALIER_UNROLL
      for (int n = 0; n < kQueryColumns / 8; ++n) {
        simt::add_fragment(to + (m * (kQueryColumns / 8) + n) * (Tiles::kWarps * 128), sums.at[m][n]);
      }
    }
  }

  /// Calls visit(vector, four sums) for this thread's elements of both gradients and their location in a
  /// part.
  template <class Visit>
  ESPALIER_KERNEL void visit_sums(int32_t number, const Visit& visit) {
    constexpr int kColumnTiles = kPartColumns / 8;
    const auto of = [&](KeyGradient gradient, Accumulators<2, kColumnTiles>& d) {
      auto* sums =
          reinterpret_cast<Floats4*>(params_.parts.sums_of(head_, number, gradient)) + simt::thread();
      ESPALIER_UNROLL
      for (int m = 0; m < 2; ++m) {
        ESPALIER_UNROLL
        for (int n = 0; n < kColumnTiles; ++n) visit(sums[(m * kColumnTiles + n) * kThreads], d.at[m][n]);
      }
    };
    of(KeyGradient::kOfKeys, grad_k_);
    of(KeyGradient::kOfValues, grad_v_);
  }

  /// Stores through shared memory; K and V are no longer used.
  ESPALIER_KERNEL void store() {
    const int chunk = part_ * (kPartColumns / kChunk);
    grad_k_.template store<kDim>(keys(), key_row_, chunk, params_.scale);
    grad_v_.template store<kDim>(values(), key_row_, chunk, 1.0F);
    simt::sync_block();
    const KeyGradients& gradients = params_.grad_sources[block_.segment + 1];
    const auto store_tile = [&](const Element* tile, const TokenHeadsData& tensor) {
      auto* data = static_cast<Element*>(tensor.data) + block_.begin * tensor.token_stride +
                   head_ * tensor.head_stride;
      store_rows<kKeys / Tiles::kWarps, kDim>(
          tile, simt::warp() * (kKeys / Tiles::kWarps),
          [&](int row) { return data + row * tensor.token_stride; },
          [&](int row) { return row < block_.num_keys(); });
    };
    store_tile(keys(), gradients.grad_k);
    store_tile(values(), gradients.grad_v);
  }

  const BackwardParams& params_;
  const KeyBlock block_;
  const int32_t head_;
  int key_row_;
  int part_;
  Accumulators<2, kPartColumns / 8> grad_k_;
  Accumulators<2, kPartColumns / 8> grad_v_;
};

template <class Tiles>
ESPALIER_KERNEL void attend_keys(const BackwardParams& params) {
  const KeyPart own = params.parts.order[simt::block_x()];
  if (own.block >= 0) KeyGradientBlock<Tiles>(params, own.block, own.head).run(own);
}

inline AttentionGrid parts_grid(const BackwardParams& params) {
  return {part_blocks(params.parts.inputs, params.schedule.inputs), 1, 1};
}

template <class Tiles>
ESPALIER_KERNEL void join_keys(const BackwardParams& params) {
  const KeyCut cut = params.parts.cuts[simt::block_x()];
  if (cut.parts > 1) KeyGradientBlock<Tiles>(params, simt::block_x(), simt::block_y()).join(cut);
}

/// Bytes of shared memory of join_keys: two tiles.
template <class Tiles>
constexpr int64_t kJoinSharedBytes =
    2 * Tiles::kKeys * Tiles::kDim * int64_t{sizeof(typename Tiles::Element)};

inline AttentionGrid join_grid(const BackwardParams& params) {
  const bool any = params.parts.cut_parts > 0;
  return {params.schedule.inputs.num_key_blocks(), any ? params.parts.inputs.heads : 0, 1};
}

// The sums to dQ -----------------------------------------------------------------------------------------

inline AttentionGrid sums_grid(const BackwardParams& params) {
  return {params.schedule.inputs.num_query_blocks(), params.num_heads / params.packing.packed, 1};
}

/// Bytes of shared memory: a tile.
template <class Tiles>
constexpr int64_t kSumsSharedBytes = Tiles::kRows * Tiles::kDim * int64_t{sizeof(typename Tiles::Element)};

/// The fragments of add_query_sums, by the same warps.
template <class Tiles>
ESPALIER_KERNEL void sums_to_queries(const BackwardParams& params) {
  using Element = typename Tiles::Element;
  constexpr int kDim = Tiles::kDim, kRows = Tiles::kRows, kRowTiles = kRows / 32, kColumnTiles = kDim / 32;
  auto* tile = reinterpret_cast<Element*>(simt::shared());
  const RowBlock rows{params.packing, params.schedule.query_begin(simt::block_x()),
                      params.schedule.query_end(simt::block_x()), simt::block_y() * params.packing.packed};
  const int64_t number =
      int64_t{simt::block_y()} * params.schedule.inputs.num_query_blocks() + simt::block_x();
  const float* from = params.sums + number * (kRows * kDim) + simt::warp() * 128;
  Accumulators<kRowTiles, kColumnTiles> sums;
  ESPALIER_UNROLL
  for (int m = 0; m < kRowTiles; ++m) {
    ESPALIER_UNROLL
    for (int n = 0; n < kColumnTiles; ++n) {
      simt::load_fragment(from + (m * kColumnTiles + n) * (Tiles::kWarps * 128), sums.at[m][n]);
    }
  }
  sums.template store<kDim>(tile, simt::warp() / 4 * (kRows / 2), simt::warp() % 4 * kColumnTiles,
                            params.scale);
  simt::sync_block();
  store_rows<kRows / Tiles::kWarps, kDim>(
      tile, simt::warp() * (kRows / Tiles::kWarps),
      [&](int row) { return static_cast<Element*>(params.grad_q.data) + rows.offset(params.grad_q, row); },
      [&](int row) { return row < rows.num_rows(); });
}

}  // namespace espalier::cuda
