// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/edge_logprobs/top_logprobs.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/blocks.h"
#include "espalier/ops/gemm/matrix_product.h"

namespace espalier {
namespace {

using detail::rows_of;

/// Selected columns of rows: values and indices.
struct Candidates {
  at::Tensor values, columns;  // [n, m], int64
};

/// The `k` largest columns of each row, by ascending column. at::topk may drop any of the entries equal to
/// the smallest one; such rows are sorted completely.
Candidates largest_of(const at::Tensor& rows, int64_t k) {
  auto [values, columns] = rows.topk(k, /*dim=*/1, /*largest=*/true, /*sorted=*/false);
  const at::Tensor crowded = rows.ge(values.amin({1}, true)).sum(1).gt(k).nonzero().squeeze(1);
  if (crowded.numel() > 0) {
    const auto [sorted, order] =
        rows.index_select(0, crowded).sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
    values.index_copy_(0, crowded, sorted.narrow(1, 0, k));
    columns.index_copy_(0, crowded, order.narrow(1, 0, k));
  }
  const auto [ascending, order] = columns.sort(1);
  return {values.gather(1, order), ascending};
}

void check(const at::Tensor& hidden, const at::Tensor& weight, int64_t k, double temperature) {
  TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                  hidden.scalar_type() == weight.scalar_type() && hidden.device() == weight.device(),
              "top_logprobs: expected hidden [R, C] and weight [V, C] of one dtype and device, received ",
              hidden.sizes(), " ", hidden.scalar_type(), " on ", hidden.device(), " and ", weight.sizes(),
              " ", weight.scalar_type(), " on ", weight.device());
  TORCH_CHECK(1 <= k && k <= weight.size(0), "top_logprobs: expected k from 1 to ", weight.size(0),
              ", received ", k);
  TORCH_CHECK(std::isfinite(temperature) && temperature > 0,
              "top_logprobs: temperature must be above 0, received ", temperature);
}

}  // namespace

TopLogprobs top_logprobs(const at::Tensor& hidden, const at::Tensor& weight, int64_t k, double temperature,
                         double softcap) {
  check(hidden, weight, k, temperature);
  const at::NoGradGuard no_grad;
  const at::ScalarType sums = detail::accumulator_dtype(hidden.scalar_type());
  const int64_t num_rows = hidden.size(0), vocabulary = weight.size(0);
  const at::Tensor top = at::empty({num_rows, k}, hidden.options().dtype(sums));
  const at::Tensor ids = at::empty({num_rows, k}, hidden.options().dtype(at::kLong));
  // The running maximum, and the sum of exp(logit - maximum). The lowest float32 is exact in every dtype.
  const at::Tensor maximum =
      at::full({num_rows}, std::numeric_limits<float>::lowest(), hidden.options().dtype(at::kDouble));
  const at::Tensor sum = at::zeros_like(maximum);
  const auto bytes = static_cast<int64_t>(at::elementSize(sums));
  const LogitBlock size = hidden.is_cpu() ? logit_block(num_rows, vocabulary, bytes)
                                          : device_logit_block(num_rows, vocabulary, bytes);
  for_each_part({0, num_rows, 0, vocabulary}, size, [&](const LogitRange& block) {
    const at::Tensor z =
        detail::unrounded_product(rows_of(hidden, block), detail::columns_of(weight, block).t());
    if (softcap > 0) z.div_(softcap).tanh_().mul_(softcap);
    if (temperature != 1) z.div_(temperature);
    const int64_t so_far = std::min(k, block.column_begin), kept = std::min(k, block.column_end);
    const at::Tensor top_here = rows_of(top, block), ids_here = rows_of(ids, block);
    const Candidates found = largest_of(z, std::min(k, block.column_end - block.column_begin));
    // Entries of earlier blocks come first, so that a stable sort orders equal ones by id.
    const auto [values, order] = at::cat({top_here.narrow(1, 0, so_far), found.values}, 1)
                                     .sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
    const at::Tensor columns =
        at::cat({ids_here.narrow(1, 0, so_far), found.columns + block.column_begin}, 1);
    ids_here.narrow(1, 0, kept).copy_(columns.gather(1, order.narrow(1, 0, kept)));
    top_here.narrow(1, 0, kept).copy_(values.narrow(1, 0, kept));
    const at::Tensor m = rows_of(maximum, block), s = rows_of(sum, block);
    const at::Tensor larger = m.maximum(values.select(1, 0).to(at::kDouble));
    s.mul_(m.sub(larger).exp_());
    s.add_(z.sub_(larger.to(sums).unsqueeze(1)).exp_().sum({1}, false, at::kDouble));
    m.copy_(larger);
  });
  const at::Tensor logprobs =
      top.to(at::kDouble).sub_(maximum.unsqueeze(1)).sub_(sum.log().unsqueeze(1)).to(sums);
  return {ids, logprobs};
}

}  // namespace espalier
