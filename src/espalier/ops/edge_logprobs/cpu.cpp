// SPDX-License-Identifier: Apache-2.0
// edge_logprobs on the CPU, by tiles of logits (rows x vocabulary entries), each computed and consumed by one
// thread while it is in cache.
//
// Forward: maximum and sum of exp(logit - maximum) per row are carried from tile to tile (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018); log p = (logit[target] - maximum) -
// log(sum).
//
// Backward: d logit[r, t] = sum_{e: edge (r, t)} g_e - exp(logit[r, t] - lse_r) sum_{e of row r} g_e, from
// recomputed logits; the tiles of a block are kept until their products are added to the gradients.
//
// Products are in product_dtype (matrix_product.h), everything else in float32 (float64); elementwise work is
// in kernels/cpu/head/logit_math.h. The partition of the work does not depend on the number of threads, and
// no two tasks add to the same element: results are bitwise identical for any number of threads.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <span>

#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/blocks.h"
#include "espalier/ops/gemm/blas.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/ops/kernels/cpu/head/logit_math.h"
#include "espalier/ops/operator.h"

namespace espalier {

void detail::check_edge_values(std::span<const int64_t> row, std::span<const int64_t> target,
                               int64_t num_rows, int64_t vocabulary) {
  for (size_t e = 0; e < row.size(); ++e) {
    const int64_t low = e == 0 ? 0 : row[e - 1];
    TORCH_CHECK(low <= row[e] && row[e] < num_rows, "edge_logprobs: edge_row[", e,
                "]: expected a value (ascending) in [", low, ", ", num_rows, "), received ", row[e]);
    TORCH_CHECK(0 <= target[e] && target[e] < vocabulary, "edge_logprobs: edge_target[", e,
                "]: expected a value in [0, ", vocabulary, "), received ", target[e]);
  }
}

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
};

// Calls work(0), ..., work(count - 1) in parallel. Products inside are single-threaded.
template <class Work>
void for_each_task(size_t count, const Work& work) {
  std::atomic<size_t> next{0};
  const int64_t num_threads = count > 1 ? at::get_num_threads() : 1;
  const auto scopes = c10::ThreadLocalDebugInfo::current();
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    // Thread-local, and other threads do not inherit them.
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::DebugInfoGuard same_kernels(scopes);
    const detail::SerialBlas serial;
    for (size_t task = next++; task < count; task = next++) work(task);
  });
}

at::Tensor compute_logits(const at::Tensor& hidden, const at::Tensor& weight, const LogitRange& tile) {
  return detail::unrounded_product(hidden.slice(0, tile.row_begin, tile.row_end),
                                   weight.slice(0, tile.column_begin, tile.column_end).t());
}

// Calls visit(edge, logit) for the edges whose logit lies in the tile.
template <class Scalar, class Visit>
void for_each_edge(const Edges& edges, const LogitRange& tile, Scalar* logits, const Visit& visit) {
  const int64_t width = tile.column_end - tile.column_begin;
  const auto first = std::ranges::lower_bound(edges.row, tile.row_begin) - edges.row.begin();
  for (auto e = static_cast<size_t>(first); e < edges.row.size() && edges.row[e] < tile.row_end; ++e) {
    const int64_t target = edges.target[e];
    if (tile.column_begin <= target && target < tile.column_end) {
      visit(e, logits[(edges.row[e] - tile.row_begin) * width + target - tile.column_begin]);
    }
  }
}

template <class Scalar>
Rows<Scalar> rows_of(const LogitRange& tile, Scalar* logits) {
  const int64_t width = tile.column_end - tile.column_begin;
  return {logits, width, tile.row_end - tile.row_begin, width};
}

// Sums of exponentials over parts of the vocabulary: part p has column tiles p, p + count, ...
template <class Scalar>
class PartialSums {
 public:
  PartialSums(int64_t num_rows, int64_t num_column_tiles)
      : count(std::min<int64_t>(num_column_tiles, 16)),
        num_rows_(num_rows),
        maximum_(static_cast<size_t>(count * num_rows), -std::numeric_limits<Scalar>::infinity()),
        sum_(maximum_.size(), 0) {}

  const int64_t count;

  ExpSums<Scalar> at(int64_t part, int64_t row) {
    return {maximum_.data() + part * num_rows_ + row, sum_.data() + part * num_rows_ + row};
  }

  struct Total {
    double maximum, log_sum;
  };
  Total total(int64_t row) {
    double maximum = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int64_t part = 0; part < count; ++part) {
      maximum = std::max(maximum, static_cast<double>(*at(part, row).maximum));
    }
    for (int64_t part = 0; part < count; ++part) {
      sum += *at(part, row).sum * std::exp(*at(part, row).maximum - maximum);
    }
    return {maximum, std::log(sum)};
  }

 private:
  int64_t num_rows_;
  std::vector<Scalar> maximum_, sum_;
};

template <class Scalar>
void compute_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const Edges& edges, Scalar* logprob,
                      double* lse) {
  const LogitMath<Scalar>& math = logit_math<Scalar>(chosen_instruction_set());
  const int64_t num_rows = hidden.size(0), vocabulary = weight.size(0);
  const auto [height, width] = kLogitTile;
  const int64_t row_tiles = (num_rows + height - 1) / height, column_tiles = (vocabulary + width - 1) / width;
  PartialSums<Scalar> sums(num_rows, column_tiles);
  for_each_task(static_cast<size_t>(row_tiles * sums.count), [&](size_t task) {
    const int64_t part = static_cast<int64_t>(task) / row_tiles,
                  row = static_cast<int64_t>(task) % row_tiles * height;
    for (int64_t column = part * width; column < vocabulary; column += sums.count * width) {
      const LogitRange tile{row, std::min(row + height, num_rows), column,
                            std::min(column + width, vocabulary)};
      const at::Tensor logits = compute_logits(hidden, weight, tile);
      const auto* data = logits.const_data_ptr<Scalar>();
      for_each_edge(edges, tile, data, [&](size_t e, Scalar logit) { logprob[e] = logit; });
      math.add_exps(rows_of(tile, data), sums.at(part, row));
    }
  });
  size_t e = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto [maximum, log_sum] = sums.total(row);
    lse[row] = maximum + log_sum;
    for (; e < edges.row.size() && edges.row[e] == row; ++e) {
      logprob[e] = static_cast<Scalar>((static_cast<double>(logprob[e]) - maximum) - log_sum);
    }
  }
}

detail::EdgeLogprobsResults edge_logprobs_cpu(const detail::EdgeLogprobsArguments& given) {
  detail::check_edge_logprobs(given);
  const at::Tensor &hidden = given.hidden, &weight = given.weight;
  const Edges edges(given.edge_row, given.edge_target);
  detail::check_edge_values(edges.row, edges.target, hidden.size(0), weight.size(0));
  const auto options = hidden.options().dtype(detail::accumulator_dtype(hidden.scalar_type()));
  const at::Tensor logprobs = at::empty({given.edge_row.size(0)}, options);
  const at::Tensor lse = at::empty({hidden.size(0)}, options.dtype(at::kDouble));
  AT_DISPATCH_FLOATING_TYPES(logprobs.scalar_type(), "edge_logprobs", [&] {
    compute_logprobs(hidden.to(detail::product_dtype(hidden)), weight, edges,
                     logprobs.mutable_data_ptr<scalar_t>(), lse.mutable_data_ptr<double>());
  });
  return {logprobs, lse};
}

// Per-row inputs of backward, in the accumulator dtype.
struct RowState {
  at::Tensor edge_grad;
  at::Tensor grad;      // sum over the row's edges
  at::Tensor lse;       // rounded
  at::Tensor lse_rest;  // remainder of the rounding
};

RowState row_state(const at::Tensor& grad_logprobs, const at::Tensor& lse, const Edges& edges,
                   at::ScalarType dtype) {
  const at::Tensor edge_grad = grad_logprobs.to(dtype).contiguous();
  const at::Tensor exact = lse.to(at::kDouble).contiguous();
  const at::Tensor rounded = exact.to(dtype);
  return {edge_grad, at::zeros(lse.sizes(), edge_grad.options()).index_add_(0, edges.row_tensor, edge_grad),
          rounded, exact.sub(rounded).to(dtype)};
}

// Overwrites the tile's logits with their gradients.
template <class Scalar>
void differentiate(const LogitRange& tile, const Edges& edges, const RowState& rows, Scalar* logits) {
  const auto tile_rows = [&](const at::Tensor& values) {
    return values.const_data_ptr<Scalar>() + tile.row_begin;
  };
  const auto* edge_grad = rows.edge_grad.const_data_ptr<Scalar>();
  logit_math<Scalar>(chosen_instruction_set())
      .differentiate(rows_of(tile, logits),
                     {tile_rows(rows.lse), tile_rows(rows.lse_rest), tile_rows(rows.grad)});
  for_each_edge(edges, tile, logits, [&](size_t e, Scalar& logit) { logit += edge_grad[e]; });
}

// Deferred products that are added to sums: as tasks, or with panels one by one in all threads.
class Products {
 public:
  // sum += a b. Tasks are sums of about 256 x 512 numbers.
  void add(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
    if (detail::uses_panels(a)) {
      detail::add_product(sum, a, b);
      return;
    }
    const int64_t width = sum.size(1);
    const int64_t slices = std::max<int64_t>(width / 512, 1);
    const LogitRange whole{0, sum.size(0), 0, width};
    for_each_part(
        whole, {256, std::max<int64_t>((width + slices - 1) / slices, 1)}, [&](const LogitRange& part) {
          const auto columns = [&](const at::Tensor& x) {
            return x.slice(1, part.column_begin, part.column_end);
          };
          const auto rows = [&](const at::Tensor& x) { return x.slice(0, part.row_begin, part.row_end); };
          tasks_.push_back({rows(columns(sum)), rows(a), columns(b)});
        });
  }

  void run() const {
    for_each_task(tasks_.size(),
                  [&](size_t i) { detail::add_product(tasks_[i].sum, tasks_[i].a, tasks_[i].b); });
  }

 private:
  struct Task {
    at::Tensor sum, a, b;
  };
  std::vector<Task> tasks_;
};

// Gradients of the block's logits, in the dtype of hidden. block_weight: the rows of the LM head in the
// block.
at::Tensor logit_gradients(const at::Tensor& hidden, const at::Tensor& block_weight, const LogitRange& block,
                           const Edges& edges, const RowState& rows) {
  const at::Tensor result =
      at::empty({block.row_end - block.row_begin, block.column_end - block.column_begin}, hidden.options());
  std::vector<LogitRange> tiles;
  for_each_part(block, kLogitTile, [&](const LogitRange& tile) { tiles.push_back(tile); });
  for_each_task(tiles.size(), [&](size_t i) {
    const LogitRange& tile = tiles[i];
    const at::Tensor logits =
        compute_logits(hidden, block_weight,
                       {tile.row_begin, tile.row_end, tile.column_begin - block.column_begin,
                        tile.column_end - block.column_begin});
    AT_DISPATCH_FLOATING_TYPES(logits.scalar_type(), "edge_logprobs", [&] {
      differentiate(tile, edges, rows, logits.mutable_data_ptr<scalar_t>());
    });
    result.slice(0, tile.row_begin - block.row_begin, tile.row_end - block.row_begin)
        .slice(1, tile.column_begin - block.column_begin, tile.column_end - block.column_begin)
        .copy_(logits);
  });
  return result;
}

// An AddHeadGradients.
void add_gradients(const detail::EdgeLogprobsSaved& saved, const at::Tensor& grad_hidden,
                   const at::Tensor& grad_weight) {
  const at::Tensor& weight = saved.given.weight;
  const auto dtype = detail::product_dtype(saved.given.hidden);
  const at::Tensor hidden = saved.given.hidden.to(dtype);
  const int64_t num_rows = hidden.size(0), vocabulary = weight.size(0);
  const auto sum_dtype = detail::accumulator_dtype(dtype);
  const Edges edges(saved.given.edge_row, saved.given.edge_target);
  detail::check_edge_values(edges.row, edges.target, num_rows, vocabulary);
  const RowState rows = row_state(saved.grad_logprobs, saved.lse, edges, sum_dtype);
  at::Tensor head_grad;  // for the LM head rows of the current block, summed over the rows so far
  const LogitBlock size = logit_block(num_rows, vocabulary, static_cast<int64_t>(at::elementSize(dtype)));
  for_each_part({0, num_rows, 0, vocabulary}, size, [&](const LogitRange& block) {
    const at::Tensor block_weight = weight.slice(0, block.column_begin, block.column_end).to(dtype);
    const at::Tensor logit_grad = logit_gradients(hidden, block_weight, block, edges, rows);
    Products products;
    if (grad_hidden.defined()) {
      products.add(grad_hidden.slice(0, block.row_begin, block.row_end), logit_grad, block_weight);
    }
    if (!grad_weight.defined()) return products.run();
    const at::Tensor place = grad_weight.slice(0, block.column_begin, block.column_end);
    if (block.row_begin == 0) head_grad = place.to(sum_dtype);
    products.add(head_grad, logit_grad.t(),
                 detail::last_columns(hidden.slice(0, block.row_begin, block.row_end), head_grad.size(1)));
    products.run();
    if (block.row_end == num_rows && !head_grad.is_same(place)) place.copy_(head_grad);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  detail::implement<&edge_logprobs_cpu, &detail::head_gradients_by<&add_gradients>>(m, "edge_logprobs");
  m.impl("edge_logprobs_backward_", detail::kKernel<&detail::add_head_gradients_by<&add_gradients>>);
}

}  // namespace espalier
