// SPDX-License-Identifier: Apache-2.0
// Attention over a forest in preorder on the CPU, on raw pointers (docs/math.md, "Attention by tiles").
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "espalier/ops/kernels/cpu/attention/schedule.h"
#include "espalier/ops/kernels/cpu/attention/tile_math.h"

namespace espalier {

/// [tokens, heads, head_dim], contiguous in the last dimension.
template <class Element>
struct TokenHeads {
  Element* data;
  int64_t token_stride;
  int64_t head_stride;

  Element* row(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

/// C = op(A) B, or C += op(A) B, row-major: op(A) is [m, k], B [k, n], C [m, n]; lda, ldb and ldc are row
/// strides. Without a factor, because the point at which BLAS applies it may depend on the number of threads.
template <class Scalar>
struct MatrixProduct {
  bool transpose_a;
  int64_t m, n, k;
  const Scalar* a;
  int64_t lda;
  const Scalar* b;
  int64_t ldb;
  Scalar* c;
  int64_t ldc;
  bool add;
};

/// Must be single-threaded.
template <class Scalar>
using Multiply = void (*)(const MatrixProduct<Scalar>&);

/// Implementations of the products of tiles (tile_products.h). For double only kBlas.
enum class TileProducts {
  kBlas,        // in float32 (float64) by `multiply`
  kPanels,      // in float32 by our own panels
  kPairPanels,  // of bfloat16 by our own panels, sums in float32
};

struct AttentionShape {
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_key_heads;  // divides num_heads
  int64_t head_dim;       // of queries and keys
  int64_t value_dim;      // of values and results

  int64_t width() const { return head_dim > value_dim ? head_dim : value_dim; }
  int64_t group() const { return num_heads / num_key_heads; }
};

template <class Element>
struct AttentionInputs {
  AttentionShape shape;
  double softmax_scale;
  const int32_t* subtree_end;
  const Schedule* schedule;
  TokenHeads<const Element> q;
  std::span<const TokenHeads<const Element>> k;  // the forest, then each context segment
  std::span<const TokenHeads<const Element>> v;
  TileProducts products;
  Multiply<AccumulatorOf<Element>> multiply;  // for kBlas
  InstructionSet isa;
  double softcap = 0;                             // of scores; 0: none
  const AccumulatorOf<Element>* sinks = nullptr;  // [num_heads], forward only; null: none

  int64_t num_tasks() const { return schedule->num_query_blocks() * shape.num_key_heads; }
};

template <class Element>
struct AttentionResults {
  TokenHeads<Element> out;
  AccumulatorOf<Element>* lse;  // [num_tokens, num_heads], natural log, over keys and sink
};

template <class Element>
struct AttentionGradients {
  TokenHeads<const Element> grad_out;
  TokenHeads<const Element> out;
  const AccumulatorOf<Element>* lse;  // [num_tokens, num_heads], as in the results
  TokenHeads<Element> grad_q;
  // Must be zero-filled; indexed like k and v of the inputs.
  std::span<const TokenHeads<AccumulatorOf<Element>>> grad_k;
  std::span<const TokenHeads<AccumulatorOf<Element>>> grad_v;
  // [num_key_heads, key blocks], must be zero-filled: number of tiles that have added to the gradients of a
  // key block.
  std::atomic<int32_t>* turns;
};

/// Block sizes for the heads and the forest; larger for long nodes.
BlockSizes attention_blocks(const AttentionShape& shape, std::span<const int32_t> subtree_end);

/// Number of scratch scalars per thread; a multiple of 64 bytes.
int64_t forward_scratch(const AttentionShape& shape, BlockSizes sizes, TileProducts products);
int64_t backward_scratch(const AttentionShape& shape, BlockSizes sizes, TileProducts products);

/// Processes tasks [0, inputs.num_tasks()) from the counter `next_task` (initially 0) until none is left. May
/// be called by any number of threads at once, each with its own scratch (64-byte aligned, uninitialised).
/// Results are complete when all calls have returned, and bitwise identical for any number of threads.
template <class Element>
void attend(const AttentionInputs<Element>& inputs, const AttentionResults<Element>& results,
            AccumulatorOf<Element>* scratch, std::atomic<int64_t>& next_task);
template <class Element>
void attend_backward(const AttentionInputs<Element>& inputs, const AttentionGradients<Element>& gradients,
                     AccumulatorOf<Element>* scratch, std::atomic<int64_t>& next_task);

}  // namespace espalier
