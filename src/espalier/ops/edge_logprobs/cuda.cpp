// SPDX-License-Identifier: Apache-2.0
// edge_logprobs on CUDA, by blocks of logits (rows x vocabulary entries), on the current stream, without
// synchronisation.
//
// Matrix products use cuBLAS. For bfloat16, logits are float32; our kernels (kernels/cuda/head/logit_math.h)
// compute maxima, sums of exponentials and logits at targets in one pass, and in the backward pass overwrite
// logits by their gradients, rounded once to bfloat16 for the two following products. float32, float64 and
// builds without our kernels use ATen operators.
//
// The gradients of hidden and weight are summed in float32 (float64) over blocks, in place (ops/
// matrix_product.h). Peak extra memory: kDeviceLogitBlockBytes for one block (four times that without our
// kernels), a float32 gradient of hidden, a few numbers per row and edge; for a bfloat16 gradient of weight,
// the float32 gradient of a block's columns.
//
// Blocks depend only on sizes, and sums over edges are in edge order: bitwise reproducible.
#include <ATen/ATen.h>

#include <limits>

#include "espalier/ops/checks.h"
#include "espalier/ops/cuda_launch.h"
#include "espalier/ops/edge_logprobs/blocks.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/ops/guarded_output.h"
#include "espalier/ops/operator.h"
#ifdef ESPALIER_CUDA_KERNELS
#include "espalier/ops/kernels/cuda/head/logit_math.h"
#endif

namespace espalier {

namespace detail {
namespace {

struct Edges {
  at::Tensor row;
  at::Tensor target;
  at::Tensor begin;  // [R + 1]: of the edges of each row

  Edges(const at::Tensor& edge_row, const at::Tensor& edge_target, int64_t num_rows)
      : row(edge_row.contiguous()),
        target(edge_target.contiguous()),
        begin(at::searchsorted(row, at::arange(num_rows + 1, row.options()))) {}
};

int64_t num_rows(const LogitRange& block) {
  return block.row_end - block.row_begin;
}
int64_t num_columns(const LogitRange& block) {
  return block.column_end - block.column_begin;
}

/// The position of an edge's logit in the block; arbitrary but valid for edges of other blocks, which are
/// masked.
struct Places {
  at::Tensor inside;
  at::Tensor row, column;

  Places(const Edges& edges, const LogitRange& block) {
    const at::Tensor r = edges.row.sub(block.row_begin), c = edges.target.sub(block.column_begin);
    inside = r.ge(0).logical_and(r.lt(num_rows(block)));
    inside = inside.logical_and(c.ge(0)).logical_and(c.lt(num_columns(block)));
    row = r.clamp(0, num_rows(block) - 1);
    column = c.clamp(0, num_columns(block) - 1);
  }
};

/// The forward pass with ATen operators; state in float64.
class ComposedForward {
 public:
  ComposedForward(const at::Tensor& hidden, const Edges& edges, const LogitBlock&)
      : edges_(edges),
        maximum_(at::full({hidden.size(0)}, -std::numeric_limits<double>::infinity(),
                          hidden.options().dtype(at::kDouble))),
        sum_(at::zeros_like(maximum_)),
        logit_(at::full({edges.row.size(0)}, std::numeric_limits<double>::quiet_NaN(), maximum_.options())) {}

  /// Adds the next block of columns of its rows.
  void add(const LogitRange& block, const at::Tensor& hidden, const at::Tensor& weight, bool) {
    const at::Tensor logits = unrounded_product(hidden, weight.t());
    const Places places(edges_, block);
    logit_ = at::where(places.inside, logits.index({places.row, places.column}).to(at::kDouble), logit_);
    const at::Tensor maximum = rows_of(maximum_, block), sum = rows_of(sum_, block);
    const at::Tensor larger = maximum.maximum(logits.amax(1).to(at::kDouble));
    sum.mul_(maximum.sub(larger).exp_());
    // The maximum is one of the logits, so converting it back is exact.
    sum.add_(logits.sub(larger.to(logits.scalar_type()).unsqueeze(1)).exp_().sum({1}, false, at::kDouble));
    maximum.copy_(larger);
  }

  std::tuple<at::Tensor, at::Tensor> result(at::ScalarType dtype) const {
    const at::Tensor log_sum = sum_.log();
    const at::Tensor logprobs = logit_.sub(maximum_.index({edges_.row})).sub(log_sum.index({edges_.row}));
    return {logprobs.to(dtype), maximum_.add(log_sum)};
  }

 private:
  const Edges& edges_;
  at::Tensor maximum_, sum_, logit_;
};

/// The gradients of logits with ATen operators.
class ComposedBackward {
 public:
  ComposedBackward(const EdgeLogprobsSaved& saved, const Edges& edges, const LogitBlock&)
      : edges_(edges),
        edge_grad_(saved.grad_logprobs.to(accumulator_dtype(saved.given.hidden.scalar_type()))),
        // index_put_ adds in edge order; index_add_ uses atomics.
        row_grad_(at::zeros({saved.given.hidden.size(0)}, edge_grad_.options())
                      .index_put_({edges.row}, edge_grad_, /*accumulate=*/true)),
        lse_(saved.lse.to(edge_grad_.scalar_type())),
        lse_rest_(saved.lse.sub(lse_).to(edge_grad_.scalar_type())) {}

  at::Tensor gradients(const LogitRange& block, const at::Tensor& hidden, const at::Tensor& weight) {
    const at::Tensor logits = unrounded_product(hidden, weight.t());
    const auto by_row = [&](const at::Tensor& values) { return rows_of(values, block).unsqueeze(1); };
    logits.sub_(by_row(lse_)).sub_(by_row(lse_rest_)).exp_().mul_(by_row(row_grad_).neg());
    const Places places(edges_, block);
    logits.index_put_({places.row, places.column}, edge_grad_.mul(places.inside), /*accumulate=*/true);
    return logits.to(product_dtype(hidden));
  }

 private:
  const Edges& edges_;
  at::Tensor edge_grad_, row_grad_, lse_, lse_rest_;
};

#ifdef ESPALIER_CUDA_KERNELS

bool takes_kernels(const at::Tensor& hidden) {
  return hidden.is_cuda() && hidden.scalar_type() == at::kBFloat16 && cuda_kernels().head;
}

/// Memory for one block of logits, with rows aligned to 256 bytes.
class BlockMemory {
 public:
  BlockMemory(const at::Tensor& hidden, const LogitBlock& size)
      : memory_(output_like({size.num_rows, (size.num_columns + 63) / 64 * 64},
                            hidden.options().dtype(at::kFloat))) {}

  cuda::LogitBlockRows fill(const LogitRange& block, const Edges& edges, const at::Tensor& hidden,
                            const at::Tensor& weight) {
    at::Tensor logits = memory_.slice(0, 0, num_rows(block)).slice(1, 0, num_columns(block));
    at::mm_out(logits, hidden, weight.t(), at::kFloat);
    return {memory_.mutable_data_ptr<float>(),
            memory_.stride(0),
            num_rows(block),
            num_columns(block),
            block.column_begin,
            edges.begin.const_data_ptr<int64_t>() + block.row_begin,
            edges.target.const_data_ptr<int64_t>()};
  }

  /// The result of differentiate_to_bfloat16.
  at::Tensor gradients(const LogitRange& block) const {
    return memory_.view(at::kBFloat16).slice(0, 0, num_rows(block)).slice(1, 0, num_columns(block));
  }

 private:
  at::Tensor memory_;
};

class KernelForward {
 public:
  KernelForward(const at::Tensor& hidden, const Edges& edges, const LogitBlock& size)
      : edges_(edges),
        memory_(hidden, size),
        maximum_(output_like({hidden.size(0)}, hidden.options().dtype(at::kFloat))),
        sum_(output_like({hidden.size(0)}, hidden.options().dtype(at::kDouble))),
        lse_(output_like({hidden.size(0)}, sum_.options())),
        logprobs_(output_like({edges.row.size(0)}, maximum_.options())
                      .fill_(std::numeric_limits<double>::quiet_NaN())) {}

  void add(const LogitRange& block, const at::Tensor& hidden, const at::Tensor& weight, bool is_last) {
    const LaunchPlace place(hidden);
    const cuda::LogitBlockRows rows = memory_.fill(block, edges_, hidden, weight);
    cuda::add_exps(rows,
                   {maximum_.mutable_data_ptr<float>() + block.row_begin,
                    sum_.mutable_data_ptr<double>() + block.row_begin, logprobs_.mutable_data_ptr<float>(),
                    lse_.mutable_data_ptr<double>() + block.row_begin},
                   block.column_begin == 0, is_last, place.stream());
  }

  std::tuple<at::Tensor, at::Tensor> result(at::ScalarType) const { return {logprobs_, lse_}; }

 private:
  const Edges& edges_;
  BlockMemory memory_;
  at::Tensor maximum_, sum_, lse_, logprobs_;
};

class KernelBackward {
 public:
  KernelBackward(const EdgeLogprobsSaved& saved, const Edges& edges, const LogitBlock& size)
      : edges_(edges),
        memory_(saved.given.hidden, size),
        edge_grad_(saved.grad_logprobs.to(at::kFloat).contiguous()),
        lse_(saved.lse.to(at::kDouble).contiguous()),
        edge_value_(output_like(edge_grad_.sizes(), edge_grad_.options())) {}

  at::Tensor gradients(const LogitRange& block, const at::Tensor& hidden, const at::Tensor& weight) {
    const LaunchPlace place(hidden);
    const cuda::LogitBlockRows rows = memory_.fill(block, edges_, hidden, weight);
    cuda::differentiate_to_bfloat16(
        rows,
        {edge_grad_.const_data_ptr<float>(), lse_.const_data_ptr<double>() + block.row_begin,
         edge_value_.mutable_data_ptr<float>()},
        place.stream());
    return memory_.gradients(block);
  }

 private:
  const Edges& edges_;
  BlockMemory memory_;
  at::Tensor edge_grad_, lse_, edge_value_;
};

#endif

template <class Forward>
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& hidden, const at::Tensor& weight,
                                           const Edges& edges, const LogitBlock& size) {
  const int64_t vocabulary = weight.size(0);
  Forward sums(hidden, edges, size);
  for_each_part({0, hidden.size(0), 0, vocabulary}, size, [&](const LogitRange& block) {
    sums.add(block, rows_of(hidden, block), columns_of(weight, block), block.column_end == vocabulary);
  });
  return sums.result(accumulator_dtype(hidden.scalar_type()));
}

template <class Backward>
void backward(const EdgeLogprobsSaved& saved, const at::Tensor& grad_hidden, const at::Tensor& grad_weight,
              const LogitBlock& size) {
  const EdgeLogprobsArguments& given = saved.given;
  const Edges edges(given.edge_row, given.edge_target, given.hidden.size(0));
  Backward logits(saved, edges, size);
  add_gradients_of_products(
      {given.hidden, given.weight},
      [&](const LogitRange& block, const at::Tensor& hidden, const at::Tensor& weight) {
        return logits.gradients(block, hidden, weight);
      },
      grad_hidden, grad_weight, size);
}

}  // namespace

at::Tensor rows_of(const at::Tensor& tensor, const LogitRange& block) {
  return tensor.slice(0, block.row_begin, block.row_end);
}

at::Tensor columns_of(const at::Tensor& tensor, const LogitRange& block) {
  return tensor.slice(0, block.column_begin, block.column_end);
}

LogitBlock block_of(int64_t num_rows, const EdgeLogprobsArguments& given) {
  const at::Tensor& hidden = given.hidden;
  const int64_t vocabulary = given.weight.size(0);
  const auto bytes = static_cast<int64_t>(at::elementSize(accumulator_dtype(hidden.scalar_type())));
  return hidden.is_cpu() ? logit_block(num_rows, vocabulary, bytes)
                         : device_logit_block(num_rows, vocabulary, bytes);
}

void add_gradients_of_products(const HiddenAndHead& given, const BlockGradients& gradients,
                               const at::Tensor& grad_hidden, const at::Tensor& grad_weight,
                               const LogitBlock& size) {
  const int64_t num_rows = given.hidden.size(0);
  const auto sum_dtype = accumulator_dtype(given.hidden.scalar_type());
  at::Tensor head_grad;  // for the current columns, over the rows so far
  for_each_part({0, num_rows, 0, given.weight.size(0)}, size, [&](const LogitRange& block) {
    const at::Tensor hidden = rows_of(given.hidden, block), weight = columns_of(given.weight, block);
    const at::Tensor logit_grad = gradients(block, hidden, weight);
    if (grad_hidden.defined()) add_product(rows_of(grad_hidden, block), logit_grad, weight);
    if (!grad_weight.defined()) return;
    const at::Tensor place = columns_of(grad_weight, block);
    if (block.row_begin == 0) head_grad = place.to(sum_dtype);
    add_product(head_grad, logit_grad.t(), last_columns(hidden, head_grad.size(1)));
    if (block.row_end == num_rows && !head_grad.is_same(place)) place.copy_(head_grad);
  });
}

std::tuple<at::Tensor, at::Tensor> edge_logprobs_by_blocks(const at::Tensor& hidden, const at::Tensor& weight,
                                                           const at::Tensor& edge_row,
                                                           const at::Tensor& edge_target,
                                                           const LogitBlock& size) {
  const Edges edges(edge_row, edge_target, hidden.size(0));
#ifdef ESPALIER_CUDA_KERNELS
  if (takes_kernels(hidden)) return forward<KernelForward>(hidden, weight, edges, size);
#endif
  return forward<ComposedForward>(hidden, weight, edges, size);
}

void add_edge_logprobs_gradients(const EdgeLogprobsSaved& saved, const at::Tensor& grad_hidden,
                                 const at::Tensor& grad_weight, const LogitBlock& size) {
#ifdef ESPALIER_CUDA_KERNELS
  if (takes_kernels(saved.given.hidden))
    return backward<KernelBackward>(saved, grad_hidden, grad_weight, size);
#endif
  backward<ComposedBackward>(saved, grad_hidden, grad_weight, size);
}

}  // namespace detail

namespace {

detail::EdgeLogprobsResults forward_cuda(const detail::EdgeLogprobsArguments& given) {
  detail::check_edge_logprobs(given);
  return detail::edge_logprobs_by_blocks(given.hidden, given.weight, given.edge_row, given.edge_target,
                                         detail::block_of(given.hidden.size(0), given));
}

void add_gradients(const detail::EdgeLogprobsSaved& saved, const at::Tensor& grad_hidden,
                   const at::Tensor& grad_weight) {
  detail::add_edge_logprobs_gradients(saved, grad_hidden, grad_weight,
                                      detail::block_of(saved.given.hidden.size(0), saved.given));
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CUDA, m) {
  detail::implement<&forward_cuda, &detail::head_gradients_by<&add_gradients>>(m, "edge_logprobs");
  m.impl("edge_logprobs_backward_", detail::kKernel<&detail::add_head_gradients_by<&add_gradients>>);
}

}  // namespace espalier
