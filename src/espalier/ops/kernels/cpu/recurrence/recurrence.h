// SPDX-License-Identifier: Apache-2.0
// Linear recurrences with matrix states along the paths of a forest, on the CPU (recurrence_math.h has the
// formulas). A task follows the chunks of some trees, for some heads, in the order of their tokens: the state
// stays in the cache, is copied where a path branches, and is not computed where nothing goes on from it.
// Tasks are the same for any number of threads, and may run in any order and at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/ops/kernels/cpu/recurrence/recurrence_math.h"

namespace espalier {

/// Tokens that follow each other on one path.
struct RecurrenceChunk {
  int64_t begin;
  int64_t size;
  int64_t parent;   // the chunk that it goes on from, an earlier one, or -1
  int64_t context;  // where parent is -1: the context that it goes on from, or -1: it begins with zeros
};

/// A forest in chunks of at most `chunk_size` tokens, in the order of the tokens, all of which they hold.
struct RecurrenceForest {
  int64_t num_tokens = 0;
  int64_t num_contexts = 0;
  int64_t chunk_size = 0;
  std::vector<RecurrenceChunk> chunks;
  std::vector<int64_t> num_children;  // by chunk
  Csr<int64_t> ends;                  // by chunk: which of the wanted states is that at its end
  Csr<int64_t> groups;                // of chunks that share neither a state nor a context with another group

  /// `end_chunks`: for each wanted state, the chunk that ends with it.
  RecurrenceForest(std::vector<RecurrenceChunk> chunks, std::span<const int64_t> end_chunks,
                   int64_t num_contexts, int64_t chunk_size);
};

/// What a recurrence is computed on. H heads, K of keys; head h reads q and k of head h / (H / K).
template <class Scalar>
struct RecurrenceProblem {
  InstructionSet instruction_set;
  bool delta;
  double scale;
  int64_t key_heads, heads, key_dim, value_dim;
  const Scalar *q, *k;     // [T, K, Dk]
  const Scalar* v;         // [T, H, Dv]
  const Scalar *g, *beta;  // [T, H]
  const Scalar* contexts;  // [N, H, Dk, Dv]
};

template <class Scalar>
struct RecurrenceResults {
  Scalar* out;   // [T, H, Dv]
  Scalar* ends;  // [E, H, Dk, Dv]
};

template <class Scalar>
struct RecurrenceGradients {
  const Scalar* out;   // as above, or null: zeros
  const Scalar* ends;  // likewise
  Scalar *q, *k;       // [recurrence_blocks, T, K, Dk]: to be summed over the blocks
  Scalar* v;
  Scalar *g, *beta;
  Scalar* contexts;  // [N, H, Dk, Dv], added to
};

/// Into how many blocks the heads of one key head are divided.
int64_t recurrence_blocks(int64_t heads_of_a_key);

/// Runs tasks [begin, end) of recurrence_tasks().
template <class Scalar>
int64_t recurrence_tasks(const RecurrenceForest& forest, const RecurrenceProblem<Scalar>& problem);
template <class Scalar>
void recurrence_forward(const RecurrenceForest& forest, const RecurrenceProblem<Scalar>& problem,
                        const RecurrenceResults<Scalar>& results, int64_t begin, int64_t end);
template <class Scalar>
void recurrence_backward(const RecurrenceForest& forest, const RecurrenceProblem<Scalar>& problem,
                         const RecurrenceGradients<Scalar>& gradients, int64_t begin, int64_t end);

}  // namespace espalier
