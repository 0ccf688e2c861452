// SPDX-License-Identifier: Apache-2.0
// Operations of edge_logprobs on blocks of logits on a GPU: launches of the kernels in logit_math.cuh.
// Pointers are to the memory of the calling thread's current device. Does not allocate or synchronise;
// results are bitwise reproducible. Throw std::runtime_error if a launch fails.
#pragma once

#include <cstdint>

namespace espalier::cuda {

/// A block of finite float32 logits and the edges of its rows.
struct LogitBlockRows {
  float* logits;   // aligned to 16 bytes
  int64_t stride;  // of rows; a multiple of 4, at least num_columns
  int64_t num_rows;
  int64_t num_columns;
  int64_t column_begin;  // in the vocabulary
  // The edges of row r are [edge_begin[r], edge_begin[r + 1]); a target outside the vocabulary is ignored.
  const int64_t* edge_begin;   // [num_rows + 1]
  const int64_t* edge_target;  // of all edges
};

/// State of rows after the blocks so far.
struct RowSums {
  float* maximum;  // [num_rows]
  double* sum;     // [num_rows] of exp(logit - maximum)
  float* logprob;  // by edge: first the logit at the target
  double* lse;     // [num_rows], written with the last block
};

/// Adds a block to its rows' sums. The first block of a row initialises them, the last one converts logits at
/// targets to log-probabilities, (logit - maximum) - log(sum) in float64, rounded once.
void add_exps(const LogitBlockRows& block, const RowSums& rows, bool is_first, bool is_last, void* stream);

struct LogitGradients {
  const float* edge_grad;  // of all edges
  const double* lse;       // [num_rows]
  float* edge_value;       // of all edges: scratch
};

/// Overwrites logits with their gradients, sum_{e: target} g_e - exp(logit - lse) sum_e g_e over the row's
/// edges, rounded once to bfloat16. Gradients of row r start at the address of its logits and are contiguous
/// (row stride 2 `stride`).
void differentiate_to_bfloat16(const LogitBlockRows& block, const LogitGradients& given, void* stream);

}  // namespace espalier::cuda
