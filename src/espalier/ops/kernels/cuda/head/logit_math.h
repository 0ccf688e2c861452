// SPDX-License-Identifier: Apache-2.0
// What edge_logprobs does with blocks of logits on a GPU: launches of the kernels in logit_math.cuh. Pointers
// are to the memory of the calling thread's current device. Nothing here allocates or waits, and results are
// bitwise identical from run to run. Throw std::runtime_error where a launch fails.
#pragma once

#include <cstdint>

namespace espalier::cuda {

/// A block of float32 logits and the edges of its rows. Logits are finite.
struct LogitBlockRows {
  float* logits;   // aligned to 16 bytes
  int64_t stride;  // of rows; a multiple of 4, at least num_columns
  int64_t num_rows;
  int64_t num_columns;
  int64_t column_begin;  // in the vocabulary
  // The edges of row r are [edge_begin[r], edge_begin[r + 1]); a target outside the vocabulary has none.
  const int64_t* edge_begin;   // [num_rows + 1]
  const int64_t* edge_target;  // of all edges
};

/// What is known of the rows after the blocks so far.
struct RowSums {
  float* maximum;  // [num_rows]
  double* sum;     // [num_rows] of exp(logit - maximum)
  float* logprob;  // of all edges: at first the logit at the edge's target
  double* lse;     // [num_rows], written with the last block
};

/// Adds a block to its rows' sums: the first one of the row begins them, and the last one turns the logits at
/// targets into log-probabilities, (logit - maximum) - log(sum) in float64, rounded once.
void add_exps(const LogitBlockRows& block, const RowSums& rows, bool is_first, bool is_last, void* stream);

struct LogitGradients {
  const float* edge_grad;  // of all edges
  const double* lse;       // [num_rows]
  float* edge_value;       // of all edges: scratch
};

/// Overwrites logits with their gradients, sum_{e: target} g_e - exp(logit - lse) sum_e g_e over the row's
/// edges, rounded once to bfloat16. Row r's gradients begin where its logits began and lie next to each other
/// (a stride of 2 `stride`).
void differentiate_to_bfloat16(const LogitBlockRows& block, const LogitGradients& given, void* stream);

}  // namespace espalier::cuda
