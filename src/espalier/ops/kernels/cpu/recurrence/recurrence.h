// SPDX-License-Identifier: Apache-2.0
// Linear recurrences with matrix states along the paths of a forest, on the CPU (recurrence_math.h has the
// formulas). A task processes the chunks of some trees for some heads in token order: the state stays in
// cache, is copied where a path branches, and is not computed if nothing continues from it. Tasks do not
// depend on the number of threads and are independent.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/ops/kernels/cpu/recurrence/recurrence_math.h"

namespace espalier {

/// Consecutive tokens of one path.
struct RecurrenceChunk {
  int64_t begin;
  int64_t size;
  int64_t parent;   // the chunk that it continues, an earlier one, or -1
  int64_t context;  // if parent is -1: the context that it continues; -1: it starts with zeros
};

/// A forest in chunks of at most `chunk_size` tokens, in token order, covering all tokens.
struct RecurrenceForest {
  int64_t num_tokens = 0;
  int64_t num_contexts = 0;
  int64_t chunk_size = 0;
  std::vector<RecurrenceChunk> chunks;
  std::vector<int64_t> num_children;  // by chunk
  Csr<int64_t> ends;                  // by chunk: indices of the requested states at its end
  Csr<int64_t> groups;                // groups of chunks without shared states or contexts

  /// `end_chunks`: for each requested state, the chunk that it is the final state of.
  RecurrenceForest(std::vector<RecurrenceChunk> chunks, std::span<const int64_t> end_chunks,
                   int64_t num_contexts, int64_t chunk_size);
};

/// The inputs of a recurrence. H heads, K of keys; head h reads q and k of head h / (H / K).
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

/// Number of blocks into which the heads of one key head are divided.
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
