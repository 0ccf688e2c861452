// edge_logprobs on the CPU, block by block of logits (rows x vocabulary entries).
//   Forward: high and sum of exp(logit - high) per row are carried from block to block (Milakov and
//   Gimelshein,
// "Online normalizer calculation for softmax", 2018); log p = (logit[target] - high) - log(sum).
//   Backward: d logit[r, t] = sum_{e: edge (r, t)} g_e - exp(logit[r, t] - lse_r) sum_{e of row r} g_e, from
// recomputed logits; each block adds its products to the gradients.
// Products are in product_dtype (matrix_product.h), everything else in float32 (float64).
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <span>

#include "espalier/ops/checks.h"
#include "espalier/ops/logit_blocks.h"
#include "espalier/ops/matrix_product.h"

namespace espalier {
namespace {

struct Edges {
  at::Tensor row_tensor;
  at::Tensor target_tensor;
  std::span<const int64_t> row;
  std::span<const int64_t> target;

  Edges(const at::Tensor& edge_row, const at::Tensor& edge_target)
      : row_tensor(edge_row.contiguous()),
        target_tensor(edge_target.contiguous()),
        row(row_tensor.const_data_ptr<int64_t>(), static_cast<size_t>(row_tensor.numel())),
        target(target_tensor.const_data_ptr<int64_t>(), static_cast<size_t>(target_tensor.numel())) {}

  void check(int64_t num_rows, int64_t vocabulary) const {
    for (size_t e = 0; e < row.size(); ++e) {
      const int64_t low = e == 0 ? 0 : row[e - 1];
      TORCH_CHECK(low <= row[e] && row[e] < num_rows, "edge_logprobs: edge_row[", e,
                  "]: expected a value (ascending) in [", low, ", ", num_rows, "), received ", row[e]);
      TORCH_CHECK(0 <= target[e] && target[e] < vocabulary, "edge_logprobs: edge_target[", e,
                  "]: expected a value in [0, ", vocabulary, "), received ", target[e]);
    }
  }
};

struct Block {
  int64_t row_begin;
  int64_t row_end;
  int64_t column_begin;
  int64_t column_end;
};

// Vocabulary entries in the outer loop, so that the gradient of an LM head row is complete after one round.
std::vector<Block> blocks_of(const at::Tensor& hidden, const at::Tensor& weight) {
  const int64_t num_rows = hidden.size(0);
  const int64_t vocabulary = weight.size(0);
  const auto dtype = detail::product_dtype(hidden);
  const auto sum_dtype = detail::accumulator_dtype(dtype);
  // Where products are of a lower dtype a block exists twice: as the product and as what is computed from it.
  const auto bytes =
      static_cast<int64_t>(at::elementSize(sum_dtype) + (sum_dtype == dtype ? 0 : at::elementSize(dtype)));
  const LogitBlock size = logit_block(num_rows, vocabulary, bytes);
  std::vector<Block> blocks;
  for (int64_t column = 0; column < vocabulary; column += size.num_columns) {
    for (int64_t row = 0; row < num_rows; row += size.num_rows) {
      blocks.push_back({row, std::min(row + size.num_rows, num_rows), column,
                        std::min(column + size.num_columns, vocabulary)});
    }
  }
  return blocks;
}

at::Tensor logits_of(const at::Tensor& hidden, const at::Tensor& weight, const Block& block) {
  return detail::wide_product(hidden.slice(0, block.row_begin, block.row_end),
                              weight.slice(0, block.column_begin, block.column_end).t());
}

// Calls visit(edge, logit) for the edges whose logit lies in the block.
template <class Scalar, class Visit>
void for_each_edge(const Edges& edges, const Block& block, const at::Tensor& logits, const Visit& visit) {
  Scalar* data = logits.mutable_data_ptr<Scalar>();
  const int64_t width = logits.size(1);
  const auto first = std::ranges::lower_bound(edges.row, block.row_begin) - edges.row.begin();
  for (auto e = static_cast<size_t>(first); e < edges.row.size() && edges.row[e] < block.row_end; ++e) {
    const int64_t target = edges.target[e];
    if (block.column_begin <= target && target < block.column_end) {
      visit(e, data[(edges.row[e] - block.row_begin) * width + target - block.column_begin]);
    }
  }
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& hidden, const at::Tensor& weight,
                                               const at::Tensor& edge_row, const at::Tensor& edge_target) {
  detail::check_edge_logprobs(hidden, weight, edge_row, edge_target);
  const Edges edges(edge_row, edge_target);
  edges.check(hidden.size(0), weight.size(0));
  const auto options = hidden.options().dtype(detail::accumulator_dtype(hidden.scalar_type()));
  const at::Tensor logprobs = at::empty({edge_row.size(0)}, options);
  const at::Tensor high = at::full({hidden.size(0)}, -std::numeric_limits<double>::infinity(), options);
  const at::Tensor sum = at::zeros({hidden.size(0)}, options);
  AT_DISPATCH_FLOATING_TYPES(logprobs.scalar_type(), "edge_logprobs", [&] {
    auto* logprob = logprobs.mutable_data_ptr<scalar_t>();
    for (const Block& block : blocks_of(hidden, weight)) {
      const at::Tensor logits = logits_of(hidden, weight, block);
      for_each_edge<scalar_t>(edges, block, logits, [&](size_t e, scalar_t logit) { logprob[e] = logit; });
      const at::Tensor block_high = high.slice(0, block.row_begin, block.row_end);
      const at::Tensor block_sum = sum.slice(0, block.row_begin, block.row_end);
      const at::Tensor new_high = logits.amax(1).maximum(block_high);
      block_sum.mul_(block_high.sub(new_high).exp_()).add_(logits.sub_(new_high.unsqueeze(1)).exp_().sum(1));
      block_high.copy_(new_high);
    }
    const auto* row_high = high.const_data_ptr<scalar_t>();
    const auto* row_sum = sum.const_data_ptr<scalar_t>();
    for (size_t e = 0; e < edges.row.size(); ++e) {
      logprob[e] = (logprob[e] - row_high[edges.row[e]]) - std::log(row_sum[edges.row[e]]);
    }
  });
  return {logprobs, high.add_(sum.log_())};
}

// Overwrites the block's logits with their gradients.
template <class Scalar>
void differentiate(const at::Tensor& logits, const Edges& edges, const Block& block, const at::Tensor& grad,
                   const at::Tensor& row_grad, const at::Tensor& lse) {
  const Scalar* edge_grad = grad.const_data_ptr<Scalar>();
  const auto column_of_rows = [&](const at::Tensor& values) {
    return values.slice(0, block.row_begin, block.row_end).unsqueeze(1);
  };
  logits.sub_(column_of_rows(lse)).exp_().mul_(column_of_rows(row_grad).neg());
  for_each_edge<Scalar>(edges, block, logits, [&](size_t e, Scalar& logit) { logit += edge_grad[e]; });
}

struct Backward {
  const at::Tensor& grad_logprobs;
  const at::Tensor& hidden;
  const at::Tensor& weight;
  const at::Tensor& edge_row;
  const at::Tensor& edge_target;
  const at::Tensor& lse;
};

// Adds to the gradients that are defined. That of hidden is in the dtype of sums; that of weight too, or in
// weight's own and zero: then it is rounded once, when all rows have been added.
void add_gradients(const Backward& given, const at::Tensor& grad_hidden, const at::Tensor& grad_weight) {
  const at::Tensor &hidden = given.hidden, &weight = given.weight;
  const auto options = hidden.options().dtype(detail::accumulator_dtype(hidden.scalar_type()));
  const Edges edges(given.edge_row, given.edge_target);
  edges.check(hidden.size(0), weight.size(0));
  const at::Tensor lse = given.lse.to(options.dtype());
  const at::Tensor grad = given.grad_logprobs.to(options.dtype()).contiguous();
  const at::Tensor row_grad = at::zeros({hidden.size(0)}, options).index_add_(0, edges.row_tensor, grad);
  at::Tensor head_grad;  // of the LM head rows of the present block, summed over the rows so far
  for (const Block& block : blocks_of(hidden, weight)) {
    at::Tensor logits = logits_of(hidden, weight, block);
    AT_DISPATCH_FLOATING_TYPES(logits.scalar_type(), "edge_logprobs",
                               [&] { differentiate<scalar_t>(logits, edges, block, grad, row_grad, lse); });
    logits = logits.to(detail::product_dtype(hidden));
    if (grad_hidden.defined()) {
      detail::add_product(grad_hidden.slice(0, block.row_begin, block.row_end), logits,
                          weight.slice(0, block.column_begin, block.column_end));
    }
    if (grad_weight.defined()) {
      const at::Tensor place = grad_weight.slice(0, block.column_begin, block.column_end);
      if (block.row_begin == 0) head_grad = place.to(options.dtype());
      detail::add_product(head_grad, logits.t(), hidden.slice(0, block.row_begin, block.row_end));
      if (block.row_end == hidden.size(0) && !head_grad.is_same(place)) place.copy_(head_grad);
    }
  }
}

at::Tensor zero_sums(const at::Tensor& like) {
  return at::zeros(like.sizes(), like.options().dtype(detail::accumulator_dtype(like.scalar_type())));
}

std::tuple<at::Tensor, at::Tensor> backward_cpu(const at::Tensor& grad_logprobs, const at::Tensor& hidden,
                                                const at::Tensor& weight, const at::Tensor& edge_row,
                                                const at::Tensor& edge_target, const at::Tensor& lse,
                                                std::array<bool, 2> output_mask) {
  detail::check_edge_logprobs(hidden, weight, edge_row, edge_target);
  at::Tensor grad_hidden, grad_weight;
  if (output_mask[0]) grad_hidden = zero_sums(hidden);
  if (output_mask[1]) grad_weight = at::zeros(weight.sizes(), weight.options());
  add_gradients({grad_logprobs, hidden, weight, edge_row, edge_target, lse}, grad_hidden, grad_weight);
  return {output_mask[0] ? grad_hidden.to(hidden.scalar_type()) : grad_hidden, grad_weight};
}

at::Tensor backward_in_place_cpu(const at::Tensor& grad_logprobs, const at::Tensor& hidden,
                                 const at::Tensor& weight, const at::Tensor& edge_row,
                                 const at::Tensor& edge_target, const at::Tensor& lse,
                                 const std::optional<at::Tensor>& grad_weight) {
  detail::check_edge_logprobs(hidden, weight, edge_row, edge_target);
  const auto dtype = detail::accumulator_dtype(hidden.scalar_type());
  TORCH_CHECK(!grad_weight || (grad_weight->sizes() == weight.sizes() && grad_weight->scalar_type() == dtype),
              "edge_logprobs_backward_: expected grad_weight ", weight.sizes(), " ", dtype, ", received ",
              grad_weight->sizes(), " ", grad_weight->scalar_type());
  const at::Tensor grad_hidden = zero_sums(hidden);
  add_gradients({grad_logprobs, hidden, weight, edge_row, edge_target, lse}, grad_hidden,
                grad_weight.value_or(at::Tensor()));
  return grad_hidden.to(hidden.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  m.impl("edge_logprobs", &forward_cpu);
  m.impl("edge_logprobs_backward", &backward_cpu);
  m.impl("edge_logprobs_backward_", &backward_in_place_cpu);
}

}  // namespace espalier
