// SPDX-License-Identifier: Apache-2.0
// edge_logprobs by blocks of logits, with the library's own products, on any device: what runs on GPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>

#include "espalier/ops/edge_logprobs/arguments.h"
#include "espalier/ops/edge_logprobs/logit_blocks.h"

namespace espalier::detail {

/// Throws where a row is not in [0, num_rows) and ascending, or a target not in [0, vocabulary).
void check_edge_values(std::span<const int64_t> row, std::span<const int64_t> target, int64_t num_rows,
                       int64_t vocabulary);

/// edge_logprobs_forward by blocks of this size. The values of edge_row and edge_target are not looked at on
/// the host: an edge whose target is outside the vocabulary has NaN or is undefined.
std::tuple<at::Tensor, at::Tensor> edge_logprobs_by_blocks(const at::Tensor& hidden, const at::Tensor& weight,
                                                           const at::Tensor& edge_row,
                                                           const at::Tensor& edge_target,
                                                           const LogitBlock& size);

/// The size of blocks of so many rows of logits, on the device of the arguments.
LogitBlock block_of(int64_t num_rows, const EdgeLogprobsArguments& given);

/// The rows or columns of a block, of tensors that have one row for each of them.
at::Tensor rows_of(const at::Tensor& tensor, const LogitRange& block);
at::Tensor columns_of(const at::Tensor& tensor, const LogitRange& block);

/// What a block's logits are the product of.
struct HiddenAndHead {
  const at::Tensor &hidden, &weight;
};

/// Gradients of the products hidden weight^T of one block of them, in their product_dtype.
using BlockGradients =
    std::function<at::Tensor(const LogitRange& block, const at::Tensor& hidden, const at::Tensor& weight)>;

/// Adds what follows from them, block by block, to the gradients that are defined: as
/// add_edge_logprobs_gradients does.
void add_gradients_of_products(const HiddenAndHead& given, const BlockGradients& gradients,
                               const at::Tensor& grad_hidden, const at::Tensor& grad_weight,
                               const LogitBlock& size);

/// The gradients of edge_logprobs (AddHeadGradients) by blocks of this size.
void add_edge_logprobs_gradients(const EdgeLogprobsSaved& given, const at::Tensor& grad_hidden,
                                 const at::Tensor& grad_weight, const LogitBlock& size);

}  // namespace espalier::detail
