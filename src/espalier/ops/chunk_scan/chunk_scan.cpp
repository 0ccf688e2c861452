// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/chunk_scan/chunk_scan.h"

#include <ATen/ATen.h>

#include <bit>
#include <limits>

#include "espalier/ops/paths.h"

namespace espalier::detail {

at::Tensor transposed(const at::Tensor& x) {
  return x.transpose(1, 2);
}

at::Tensor row_dots(const at::Tensor& a, const at::Tensor& b) {
  return (a * b).sum({-1});
}

at::Tensor BucketRows::by_head(const at::Tensor& x) const {
  const int64_t n = bucket->num_chunks(), length = bucket->length, heads = x.size(1), dim = x.size(2);
  return x.index_select(0, token)
      .view({n, length, heads, dim})
      .transpose(1, 2)
      .reshape({n * heads, length, dim});
}

at::Tensor BucketRows::by_token(const at::Tensor& x) const {
  const int64_t n = bucket->num_chunks(), length = bucket->length, dim = x.size(2), heads = x.size(0) / n;
  return x.view({n, heads, length, dim}).transpose(1, 2).reshape({n * length, heads, dim});
}

at::Tensor BucketRows::is_token(int64_t heads, at::ScalarType dtype) const {
  const at::Tensor sizes = to_indices(bucket->size, token.device()).repeat_interleave(heads).unsqueeze(1);
  return at::arange(bucket->length, sizes.options()).lt(sizes).to(dtype);
}

at::Tensor BucketRows::at_level(const at::Tensor& x, int64_t level) const {
  const int64_t rows_per_chunk = x.size(0) / bucket->num_chunks();
  return x.narrow(0, bucket->level_begin[level] * rows_per_chunk, bucket->num_chunks(level) * rows_per_chunk);
}

ChunkDecays::ChunkDecays(const at::Tensor& g) {
  const int64_t length = g.size(1);
  // Differences of sums of large numbers: in float64, regardless of the accumulator dtype.
  const at::Tensor sum = g.cumsum(1, at::kDouble), last = sum.narrow(1, length - 1, 1);
  const auto to_exp = [&](const at::Tensor& exponent) { return exponent.to(g.scalar_type()).exp(); };
  before = to_exp(sum);
  after = to_exp(last - sum);
  whole = to_exp(last).squeeze(1);
  const at::Tensor above = at::ones({length, length}, sum.options().dtype(at::kBool)).triu_(1);
  between = to_exp(
      (sum.unsqueeze(2) - sum.unsqueeze(1)).masked_fill_(above, -std::numeric_limits<double>::infinity()));
}

at::Tensor chunk_decays_backward(const ChunkDecayGradients& log_gradients) {
  const auto from_here = [](const at::Tensor& x) { return x.flip({1}).cumsum(1).flip({1}); };
  // g of a token contributes to the decays from all tokens before it to it and later ones. Summed directly,
  // because differences of longer sums would lose small gradients to rounding.
  const at::Tensor inside = from_here(log_gradients.between).tril_(-1).sum({2});
  const at::Tensor from_start = from_here(log_gradients.before);
  const at::Tensor to_end = at::constant_pad_nd(log_gradients.after.cumsum(1), {1, -1});
  return inside + from_start + to_end + log_gradients.whole.unsqueeze(1);
}

void check_chunk_size(const char* op, int64_t chunk_size) {
  TORCH_CHECK(chunk_size > 0 && std::has_single_bit(static_cast<uint64_t>(chunk_size)), op,
              ": chunk_size must be a power of two, received ", chunk_size);
}

ChunkScan::ChunkScan(const char* op, const at::Tensor& rows, const ScanPaths& paths) {
  check_chunk_size(op, paths.chunk_size);
  const int64_t num_tokens = rows.size(0);
  const auto prev = checked_prev(op, paths.prev, num_tokens, paths.num_contexts);
  tree_ = make_chunk_tree(prev, checked_tokens(op, "ends", paths.ends, num_tokens), paths.chunk_size);
  const auto on_device = [&](const std::vector<int64_t>& list) { return to_indices(list, rows.device()); };
  for (const ChunkBucket& bucket : tree_.buckets) buckets_.push_back({&bucket, on_device(bucket.token)});
  place_ = on_device(tree_.place);
  source_ = on_device(tree_.source.values);
  end_ = on_device(tree_.end.values);
  end_number_ = on_device(tree_.end_number.values);
}

at::Tensor ChunkScan::in_token_order(const std::vector<at::Tensor>& rows) const {
  return at::cat(rows).index_select(0, place_);
}

namespace {

/// Row `level` of a list.
at::Tensor level_row(const at::Tensor& list, const Csr<int64_t>& csr, int64_t level) {
  return list.narrow(0, csr.offsets[level], csr.row_size(level));
}

std::vector<int64_t> with_count(int64_t count, const at::Tensor& states) {
  std::vector<int64_t> shape = states.sizes().vec();
  shape[0] = count;
  return shape;
}

}  // namespace

/// Calls work(bucket, indices of the initial states of its chunks on the level).
template <class Work>
void ChunkScan::over_buckets(int64_t level, const Work& work) const {
  int64_t offset = tree_.source.offsets[level];
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const int64_t count = buckets_[b].bucket->num_chunks(level);
    if (count > 0) work(b, source_.narrow(0, offset, count));
    offset += count;
  }
}

at::Tensor ChunkScan::run(const at::Tensor& first, const Step& step) const {
  at::Tensor before = first;
  std::vector<at::Tensor> found;
  for (int64_t level = 0; level < tree_.num_levels(); ++level) {
    std::vector<at::Tensor> after;
    over_buckets(level, [&](size_t b, const at::Tensor& source) {
      after.push_back(step(b, level, before.index_select(0, source)));
    });
    before = after.size() == 1 ? after.front() : at::cat(after);
    if (tree_.end.row_size(level) > 0)
      found.push_back(before.index_select(0, level_row(end_, tree_.end, level)));
  }
  at::Tensor ends = at::empty(with_count(end_.size(0), first), first.options());
  if (!found.empty()) ends.index_copy_(0, end_number_, at::cat(found));
  return ends;
}

at::Tensor ChunkScan::run_back(const at::Tensor& first, const at::Tensor& grad_ends, const Step& step) const {
  at::Tensor grad;  // with respect to the final states of a level's chunks, from the level below
  for (int64_t level = tree_.num_levels() - 1; level >= 0; --level) {
    if (!grad.defined()) grad = at::zeros(with_count(tree_.source.row_size(level), first), first.options());
    if (grad_ends.defined() && tree_.end.row_size(level) > 0) {
      grad.index_add_(0, level_row(end_, tree_.end, level),
                      grad_ends.index_select(0, level_row(end_number_, tree_.end_number, level)));
    }
    const int64_t num_above = level > 0 ? tree_.source.row_size(level - 1) : first.size(0);
    at::Tensor above = at::zeros(with_count(num_above, first), first.options());
    int64_t done = 0;
    over_buckets(level, [&](size_t b, const at::Tensor& source) {
      above.index_add_(0, source, step(b, level, grad.narrow(0, done, source.size(0))));
      done += source.size(0);
    });
    grad = above;
  }
  return grad;
}

at::Tensor first_states(const at::Tensor& contexts, at::IntArrayRef shape, const at::TensorOptions& options) {
  std::vector<int64_t> one{1};
  one.insert(one.end(), shape.begin(), shape.end());
  const at::Tensor zero = at::zeros(one, options);
  return contexts.defined() ? at::cat({zero, contexts}) : zero;
}

}  // namespace espalier::detail
