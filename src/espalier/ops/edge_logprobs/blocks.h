// SPDX-License-Identifier: Apache-2.0
// edge_logprobs by blocks of logits, with LibTorch's matrix products, for any device. Used on GPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>

#include "espalier/ops/edge_logprobs/arguments.h"
#include "espalier/ops/edge_logprobs/logit_blocks.h"

namespace espalier::detail {

/// Throws unless rows are in [0, num_rows) and ascending, and targets in [0, vocabulary).
void check_edge_values(std::span<const int64_t> row, std::span<const int64_t> target, int64_t num_rows,
                       int64_t vocabulary);

/// edge_logprobs_forward by blocks of this size. The values of edge_row and edge_target are not checked:
/// results of an edge with an invalid target are NaN or undefined.
std::tuple<at::Tensor, at::Tensor> edge_logprobs_by_blocks(const at::Tensor& hidden, const at::Tensor& weight,
                                                           const at::Tensor& edge_row,
                                                           const at::Tensor& edge_target,
                                                           const LogitBlock& size);

/// The block size for this number of rows of logits on the device of the arguments.
LogitBlock block_of(int64_t num_rows, const EdgeLogprobsArguments& given);

/// The slice of a tensor with one row per row, or column, of the logits.
at::Tensor rows_of(const at::Tensor& tensor, const LogitRange& block);
at::Tensor columns_of(const at::Tensor& tensor, const LogitRange& block);

/// The last columns of a factor: those whose gradients are wanted.
inline at::Tensor last_columns(const at::Tensor& factor, int64_t count) {
  return factor.slice(1, factor.size(1) - count, factor.size(1));
}

/// The factors of a block of logits.
struct HiddenAndHead {
  const at::Tensor &hidden, &weight;
};

/// Computes the gradients of a block of hidden weight^T, in product_dtype.
using BlockGradients =
    std::function<at::Tensor(const LogitRange& block, const at::Tensor& hidden, const at::Tensor& weight)>;

/// Accumulates the resulting gradients of hidden and weight block by block, like add_edge_logprobs_gradients.
void add_gradients_of_products(const HiddenAndHead& given, const BlockGradients& gradients,
                               const at::Tensor& grad_hidden, const at::Tensor& grad_weight,
                               const LogitBlock& size);

/// The gradients of edge_logprobs (AddHeadGradients) by blocks of this size.
void add_edge_logprobs_gradients(const EdgeLogprobsSaved& given, const at::Tensor& grad_hidden,
                                 const at::Tensor& grad_weight, const LogitBlock& size);

}  // namespace espalier::detail
