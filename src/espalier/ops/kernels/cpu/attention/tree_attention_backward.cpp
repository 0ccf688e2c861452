// SPDX-License-Identifier: Apache-2.0
// Backward pass of tree attention on the CPU.
//   P = 2^(s - lse log2(e)), dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = scale dS K,
// dK = scale dS^T Q, dS times the derivative of the softcap (docs/math.md): five products per tile, P and dS
// kept transposed as in the forward pass.
//   A thread processes one tile (one block of queries, all heads of a group) at a time and owns its dQ. Its
//   contributions to dK and dV of a key block are added after those of the tiles before it (Tile::turn), so
//   the order of summation is fixed. Query blocks are assigned in query_order, so a thread only waits for
//   tiles that are being processed: no deadlock. Accumulator: float (double for double).
#include <algorithm>
#include <numbers>
#include <thread>

#include "espalier/ops/kernels/cpu/attention/tile_products.h"

namespace espalier {
namespace {

template <class Element, class Products>
class Backward {
  using Scalar = AccumulatorOf<Element>;

 public:
  Backward(const AttentionInputs<Element>& inputs, const AttentionGradients<Element>& gradients,
           Scratch<Scalar> scratch)
      : in_(inputs),
        gradients_(gradients),
        math_(tile_math<Scalar>(inputs.isa)),
        converter_(inputs.isa),
        chunks_(*inputs.schedule, inputs.subtree_end, inputs.shape.group()),
        stride_(round_up(inputs.schedule->sizes.queries * inputs.shape.group(), kCacheLine)),
        products_({stride_, inputs.shape.width(), inputs.isa, inputs.multiply}, kNumTileOperands, scratch) {
    const int64_t width = in_.shape.width();
    for (Scalar** rows : {&q_, &grad_out_, &grad_q_}) *rows = scratch.take(stride_ * width);
    for (Scalar** keys : {&k_, &v_, &grad_keys_}) *keys = scratch.take(kMaxChunkKeys * width);
    for (Scalar** tile : {&scores_, &grad_scores_}) *tile = scratch.take(stride_ * kMaxChunkKeys);
    for (Scalar** row : {&lse2_, &lse2_rest_, &delta_}) *row = scratch.take(stride_);
  }

  static int64_t scratch(const AttentionShape& shape, BlockSizes sizes) {
    const int64_t stride = round_up(sizes.queries * shape.group(), kCacheLine);
    const int64_t width = round_up(shape.width(), kCacheLine);
    return 3 * stride * width + 3 * kMaxChunkKeys * width + 2 * stride * kMaxChunkKeys + 3 * stride +
           Products::scratch(stride, shape.width(), kNumTileOperands);
  }

  void run(int32_t query_block, int64_t key_head) {
    const TileRows tile = tile_rows(in_, query_block, key_head);
    begin(tile);
    chunks_.start(query_block);
    while (chunks_.next()) differentiate(chunks_.chunk(), key_head);
    std::fill_n(delta_, tile.count(), scale());
    math_.scale_rows({grad_q_, in_.shape.head_dim, tile.count(), in_.shape.head_dim}, delta_);
    store_rows(grad_q_, tile, in_.shape.head_dim, converter_, gradients_.grad_q);
  }

 private:
  void begin(const TileRows& tile) {
    const int64_t d = in_.shape.head_dim, e = in_.shape.value_dim;
    const int64_t rows = tile.count();
    load_rows(gradients_.grad_out, tile, e, converter_, grad_out_);
    load_rows(gradients_.out, tile, e, converter_, q_);
    math_.dot_rows({grad_out_, e, rows, e}, {q_, e, rows, e}, delta_);
    products_.take_rows(kOutputGradients, {grad_out_, e, rows, e}, 1);
    grad_out_non_finite_.take_out(math_, grad_out_, rows, e);
    products_.take_summands(kOutputGradients, {grad_out_, e, rows, e}, 1);
    load_rows(in_.q, tile, d, converter_, q_);
    const auto factor = static_cast<Scalar>(in_.softmax_scale * std::numbers::log2e);
    products_.take_rows(kQueries, {q_, d, rows, d}, factor);
    q_non_finite_.take_out(math_, q_, rows, d);
    products_.take_summands(kQueries, {q_, d, rows, d}, scale());  // for dK; dQ is scaled at the end
    for (int64_t r = 0; r < rows; ++r) {
      const double lse = gradients_.lse[tile.token(r) * in_.shape.num_heads + tile.head(r)];
      const double lse2 = lse * std::numbers::log2e;
      lse2_[r] = static_cast<Scalar>(lse2);
      lse2_rest_[r] = static_cast<Scalar>(lse2 - lse2_[r]);
    }
    std::fill_n(grad_q_, rows * d, Scalar(0));
  }

  void differentiate(const KeyChunk& chunk, int64_t key_head) {
    const int64_t d = in_.shape.head_dim;
    const Rows<const Scalar> k = rows_of_keys(in_.k, chunk, key_head, d, converter_, k_);
    const Rows<const Scalar> v = rows_of_keys(in_.v, chunk, key_head, in_.shape.value_dim, converter_, v_);
    products_.score(kQueries, k, chunk.rows, scores_);
    products_.score(kOutputGradients, v, chunk.rows, grad_scores_);
    const RowRange* visible = chunk.visible.data();
    const ScoreTile<Scalar> p{scores_, stride_, chunk.num_keys(), chunk.rows, visible};
    const ScoreTile<Scalar> ds{grad_scores_, stride_, chunk.num_keys(), chunk.rows, visible};
    const ScoreGradient<Scalar> gradient{grad_scores_, lse2_, lse2_rest_, delta_};
    if (in_.softcap > 0) {
      math_.differentiate_capped(p, gradient, static_cast<Scalar>(in_.softcap * std::numbers::log2e));
    } else {
      math_.differentiate(p, gradient);
    }
    if (chunk.partial) k_non_finite_.take_out(math_, k_, chunk.num_keys(), d);
    products_.sum_over_keys(ds, k, grad_q_);
    if (chunk.partial) k_non_finite_.add_over_keys(ds, grad_q_, d);
    await_turn(chunk, key_head);
    add_to_keys(chunk, ds, kQueries, {gradients_.grad_k, key_head, d});
    add_to_keys(chunk, p, kOutputGradients, {gradients_.grad_v, key_head, in_.shape.value_dim});
    pass_turn(chunk, key_head);
  }

  /// dK or dV of all segments for one key head.
  struct KeySums {
    std::span<const TokenHeads<Scalar>> segments;
    int64_t key_head;
    int64_t width;

    Rows<Scalar> rows(const KeySpan& range) const {
      const TokenHeads<Scalar>& segment = segments[range.segment];
      return {segment.row(range.begin, key_head), segment.token_stride, range.count, width};
    }
  };

  // sums += weights rows, through a buffer unless the keys of the chunk are adjacent.
  void add_to_keys(const KeyChunk& chunk, const ScoreTile<Scalar>& weights, TileOperand operand,
                   const KeySums& sums) {
    const int64_t d = sums.width;
    // Row strides of whole pages cause cache conflicts, so such rows go through the buffer.
    const bool adjacent = chunk.ranges.size() == 1 && sums.rows(chunk.ranges[0]).stride % 1024 != 0;
    const Rows<Scalar> to =
        adjacent ? sums.rows(chunk.ranges[0]) : Rows<Scalar>{grad_keys_, d, chunk.num_keys(), d};
    products_.sum_over_rows(operand, weights, to, adjacent);
    if (operand == kQueries) {
      q_non_finite_.add_over_rows(weights, scale(), to.data, to.stride);
    } else {
      grad_out_non_finite_.add_over_rows(weights, 1, to.data, to.stride);
    }
    if (adjacent) return;
    const Scalar* part = grad_keys_;
    for (const KeySpan& range : chunk.ranges) {
      math_.add_rows({part, d, range.count, d}, sums.rows(range));
      part += range.count * d;
    }
  }

  Scalar scale() const { return static_cast<Scalar>(in_.softmax_scale); }

  std::atomic<int32_t>& turn_of(const Tile& tile, int64_t key_head) {
    const auto blocks = static_cast<int64_t>(in_.schedule->key_blocks.size());
    return gradients_.turns[key_head * blocks + tile.key_block];
  }

  void await_turn(const KeyChunk& chunk, int64_t key_head) {
    for (const Tile& tile : chunk.tiles) {
      const std::atomic<int32_t>& turn = turn_of(tile, key_head);
      while (turn.load(std::memory_order_acquire) != tile.turn) std::this_thread::yield();
    }
  }

  void pass_turn(const KeyChunk& chunk, int64_t key_head) {
    for (const Tile& tile : chunk.tiles.first(chunk.num_finished)) {
      turn_of(tile, key_head).store(tile.turn + 1, std::memory_order_release);
    }
  }

  const AttentionInputs<Element>& in_;
  const AttentionGradients<Element>& gradients_;
  const TileMath<Scalar>& math_;
  Converter<Scalar> converter_;
  KeyChunks chunks_;
  NonFinite<Scalar> q_non_finite_, k_non_finite_, grad_out_non_finite_;
  int64_t stride_;  // rows of a tile, rounded up
  Products products_;
  Scalar *q_, *grad_out_, *grad_q_;
  Scalar *k_, *v_, *grad_keys_;
  Scalar *scores_, *grad_scores_;
  Scalar *lse2_, *lse2_rest_, *delta_;
};

}  // namespace

int64_t backward_scratch(const AttentionShape& shape, BlockSizes sizes, TileProducts products) {
  return with_tile_products<float>(
      products, [&]<class Products>() { return Backward<float, Products>::scratch(shape, sizes); });
}

template <class Element>
void attend_backward(const AttentionInputs<Element>& inputs, const AttentionGradients<Element>& gradients,
                     AccumulatorOf<Element>* scratch, std::atomic<int64_t>& next_task) {
  with_tile_products<Element>(inputs.products, [&]<class Products>() {
    Backward<Element, Products> backward(inputs, gradients, Scratch(scratch));
    const int64_t heads = inputs.shape.num_key_heads;
    for (int64_t task = next_task++; task < inputs.num_tasks(); task = next_task++) {
      backward.run(inputs.schedule->query_order[task / heads], task % heads);
    }
  });
}

template void attend_backward(const AttentionInputs<double>&, const AttentionGradients<double>&, double*,
                              std::atomic<int64_t>&);
template void attend_backward(const AttentionInputs<float>&, const AttentionGradients<float>&, float*,
                              std::atomic<int64_t>&);
template void attend_backward(const AttentionInputs<BFloat16>&, const AttentionGradients<BFloat16>&, float*,
                              std::atomic<int64_t>&);

}  // namespace espalier
