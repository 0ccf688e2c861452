// SPDX-License-Identifier: Apache-2.0
// Forward pass of tree attention on the CPU.
//
// With s = scale log2(e) q . k over the visible keys, or its softcap: m = max s, l = sum 2^(s - m), O = sum
// 2^(s - m) v / l, lse = ln(2) (m + log2 l), chunk of keys by chunk of keys with m, l and O rescaled as m
// grows (Dao, FlashAttention-2, 2023, algorithm 1). Scores are kept transposed, [keys, rows]: sums over keys
// are vertical, the rows that see a key are adjacent, and both products are fast.
//
// A thread processes one tile at a time: one block of queries, all heads of a group. Accumulator: float
// (double for double). Tiles are independent.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "espalier/ops/kernels/cpu/attention/tile_products.h"

namespace espalier {
namespace {

template <class Element, class Products>
class Forward {
  using Scalar = AccumulatorOf<Element>;

 public:
  Forward(const AttentionInputs<Element>& inputs, const AttentionResults<Element>& results,
          Scratch<Scalar> scratch)
      : in_(inputs),
        results_(results),
        math_(tile_math<Scalar>(inputs.isa)),
        converter_(inputs.isa),
        chunks_(*inputs.schedule, inputs.subtree_end, inputs.shape.group()),
        stride_(round_up(inputs.schedule->sizes.queries * inputs.shape.group(), kCacheLine)),
        products_({stride_, inputs.shape.width(), inputs.isa, inputs.multiply}, kOperands, scratch) {
    out_ = scratch.take(stride_ * in_.shape.width());  // queries first
    scores_ = scratch.take(stride_ * kMaxChunkKeys);
    k_ = scratch.take(kMaxChunkKeys * in_.shape.head_dim);
    v_ = scratch.take(kMaxChunkKeys * in_.shape.value_dim);
    state_ = {scratch.take(stride_), scratch.take(stride_), scratch.take(stride_)};
  }

  static int64_t scratch(const AttentionShape& shape, BlockSizes sizes) {
    const int64_t stride = round_up(sizes.queries * shape.group(), kCacheLine);
    const int64_t width = round_up(shape.width(), kCacheLine);
    return stride * width + stride * kMaxChunkKeys + 2 * kMaxChunkKeys * width + 3 * stride +
           Products::scratch(stride, shape.width(), kOperands);
  }

  void run(int32_t query_block, int64_t key_head) {
    const TileRows tile = tile_rows(in_, query_block, key_head);
    begin(tile);
    chunks_.start(query_block);
    while (chunks_.next()) add_chunk(chunks_.chunk(), key_head);
    finish(tile);
  }

 private:
  static constexpr int kOperands = 1;  // queries

  void begin(const TileRows& tile) {
    const int64_t d = in_.shape.head_dim;
    load_rows(in_.q, tile, d, converter_, out_);
    const auto factor = static_cast<Scalar>(in_.softmax_scale * std::numbers::log2e);
    products_.take_rows(kQueries, {out_, d, tile.count(), d}, factor);
    std::fill_n(out_, tile.count() * in_.shape.value_dim, Scalar(0));
    if (in_.sinks == nullptr) {
      std::fill_n(state_.maximum, tile.count(), -std::numeric_limits<Scalar>::infinity());
      std::fill_n(state_.sum, tile.count(), Scalar(0));
      return;
    }
    // The sink is a first key with value 0, visible to every row.
    for (int64_t r = 0; r < tile.count(); ++r) {
      state_.maximum[r] = static_cast<Scalar>(in_.sinks[tile.head(r)] * std::numbers::log2e);
      state_.sum[r] = 1;
    }
  }

  void add_chunk(const KeyChunk& chunk, int64_t key_head) {
    const int64_t d = in_.shape.value_dim;
    const int64_t first = chunk.rows.begin, num_rows = chunk.rows.end - first;
    const Rows<const Scalar> k = rows_of_keys(in_.k, chunk, key_head, in_.shape.head_dim, converter_, k_);
    products_.score(kQueries, k, chunk.rows, scores_);
    const ScoreTile<Scalar> scores{scores_, stride_, chunk.num_keys(), chunk.rows, chunk.visible.data()};
    if (in_.softcap > 0) math_.cap_scores(scores, static_cast<Scalar>(in_.softcap * std::numbers::log2e));
    math_.softmax_step(scores, state_);
    math_.scale_rows({out_ + first * d, d, num_rows, d}, state_.correction + first);
    const Rows<const Scalar> v = rows_of_keys(in_.v, chunk, key_head, d, converter_, v_);
    if (chunk.partial) non_finite_.take_out(math_, v_, chunk.num_keys(), d);
    products_.sum_over_keys(scores, v, out_);
    if (chunk.partial) non_finite_.add_over_keys(scores, out_, d);
  }

  void finish(const TileRows& tile) {
    for (int64_t r = 0; r < tile.count(); ++r) {
      const Scalar sum = state_.sum[r];
      // In float64, for one rounding instead of three: the error of lse scales P in the backward pass.
      const double lse2 = state_.maximum[r] + std::log2(static_cast<double>(sum));
      results_.lse[tile.token(r) * in_.shape.num_heads + tile.head(r)] =
          static_cast<Scalar>(lse2 * std::numbers::ln2);
    }
    const int64_t d = in_.shape.value_dim;
    math_.divide_rows({out_, d, tile.count(), d}, state_.sum);
    store_rows(out_, tile, d, converter_, results_.out);
  }

  const AttentionInputs<Element>& in_;
  const AttentionResults<Element>& results_;
  const TileMath<Scalar>& math_;
  Converter<Scalar> converter_;
  KeyChunks chunks_;
  NonFinite<Scalar> non_finite_;
  int64_t stride_;  // rows of a tile, rounded up
  Products products_;
  Scalar *out_, *scores_, *k_, *v_;
  SoftmaxState<Scalar> state_;
};

}  // namespace

int64_t forward_scratch(const AttentionShape& shape, BlockSizes sizes, TileProducts products) {
  return with_tile_products<float>(
      products, [&]<class Products>() { return Forward<float, Products>::scratch(shape, sizes); });
}

template <class Element>
void attend(const AttentionInputs<Element>& inputs, const AttentionResults<Element>& results,
            AccumulatorOf<Element>* scratch, std::atomic<int64_t>& next_task) {
  with_tile_products<Element>(inputs.products, [&]<class Products>() {
    Forward<Element, Products> forward(inputs, results, Scratch(scratch));
    const int64_t heads = inputs.shape.num_key_heads;
    for (int64_t task = next_task++; task < inputs.num_tasks(); task = next_task++) {
      forward.run(inputs.schedule->query_order[task / heads], task % heads);
    }
  });
}

template void attend(const AttentionInputs<double>&, const AttentionResults<double>&, double*,
                     std::atomic<int64_t>&);
template void attend(const AttentionInputs<float>&, const AttentionResults<float>&, float*,
                     std::atomic<int64_t>&);
template void attend(const AttentionInputs<BFloat16>&, const AttentionResults<BFloat16>&, float*,
                     std::atomic<int64_t>&);

}  // namespace espalier
